"""The OpenAI dialect of the public API: bodies in, gateway requests out; answers in, JSON and events out."""
