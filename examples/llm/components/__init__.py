"""The services of the language model's graphs: each is one of pydynamo's own commands, and its section its flags."""
