"""The data of the console: bounded histories and tables of plain values, which the frontend fills."""
