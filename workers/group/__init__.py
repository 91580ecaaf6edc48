"""A worker of several ranks: one process each, with a share of the models and of every page, or with whole heads and
requests of its own; one of them schedules.
"""
