"""A small HTTP/1.1 server on asyncio and httptools, for the frontend's API and each process's system port; a client."""
