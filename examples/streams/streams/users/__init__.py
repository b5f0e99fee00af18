"""The service `users`: its database has the users and their accounts."""
