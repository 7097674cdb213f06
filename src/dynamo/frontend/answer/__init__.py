"""From what workers say to what a client reads: choices, their shapes in each API, and how they are delivered."""
