"""The names under which users of NVIDIA Dynamo import its parts for engines."""
