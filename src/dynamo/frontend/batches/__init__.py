"""OpenAI's files and batches: uploads on disk, a journal of batches, and the runner that answers their lines."""
