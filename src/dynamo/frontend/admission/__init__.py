"""Who may come in, and when: keys and their limits, workers that are busy, requests that wait. Off unless asked for."""
