"""From a stream into the store: checked, once."""
