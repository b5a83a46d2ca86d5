"""The data folder, the deployment and its adapters: the one package that names adapters."""
