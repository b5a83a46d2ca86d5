"""The registry of signed models, on any object store, and the gate that promotes them."""
