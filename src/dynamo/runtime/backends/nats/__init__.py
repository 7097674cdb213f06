"""What NATS carries, when it is asked to: requests, events and queues of work. The one door to nats-py."""
