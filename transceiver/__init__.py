"""Ships KV from a context worker to a generation worker: messages, handshake, copy plans, state machines,
transports.
"""
