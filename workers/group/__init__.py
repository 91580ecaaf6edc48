"""A worker of several ranks: one process each, a share of the models and of every page in each, one that schedules."""
