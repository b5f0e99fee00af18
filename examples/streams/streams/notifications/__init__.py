"""The service `notifications`: its database has the deliveries."""
