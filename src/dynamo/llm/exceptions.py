"""The errors of a handler, by the names that users of NVIDIA Dynamo import and raise; each is one of `base.errors`.

A frontend answers InvalidArgument with status 400; the request of a worker that raises EngineShutdown, CannotConnect,
Disconnected, ConnectionTimeout or StreamIncomplete migrates to another.
"""

from dynamo.base import errors

DynamoException = errors.DynamoError
InvalidArgument = errors.InvalidRequest
Cancelled = errors.Cancelled
EngineShutdown = errors.WorkerLost
CannotConnect = Disconnected = ConnectionTimeout = StreamIncomplete = errors.StreamBroken
RouterQueueLimitExceeded, WorkerUnavailable = errors.Overloaded, errors.NoWorkers  # of a `KvRouter`
Unknown = errors.EngineFailed
