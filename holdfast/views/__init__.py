"""Views: documents, filters, explanations and operations shared by CLI, HTTP API and console."""
