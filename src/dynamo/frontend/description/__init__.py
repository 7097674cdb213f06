"""What the frontend says of itself: OpenAPI's document and the page that shows it."""
