"""The data folder, the deployment, and which adapter an address means: the one package that
knows adapters."""
