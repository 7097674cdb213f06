"""The APIs of the frontend: one folder for each, with its requests, its answers, its routes and their description."""
