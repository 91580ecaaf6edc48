"""Doors that speak vLLM's engine protocol, for gateways that drive prefill and decode themselves."""
