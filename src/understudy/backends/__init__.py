"""The data folder, the deployment, and the adapters that open its streams and stores by URL."""
