# A worker with the native engine, on CPU or GPU, and the simulated one.
# Not built by the tests, which have no container engine: they lint this file, and check the steps that need none.
ARG BASE=python:3.12-slim
FROM ${BASE}
ARG EXTRAS=native,etcd,nats,kubernetes,semantic,otel
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 HF_HOME=/models
WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src ./src
RUN pip install --constraint constraints.txt ".[${EXTRAS}]" && rm -rf /src/*
# The folders that manifests name as their working directory.
RUN mkdir -p /workspace/components/backends/vllm /workspace/components/src/dynamo/planner /workspace/examples/backends/vllm /models \
    && cp "$(python3 -c 'import importlib.util as u; print(u.find_spec("dynamo.planner.planner_sla").origin)')" /workspace/components/src/dynamo/planner/ \
    && useradd --uid 65532 --user-group --create-home dynamo \
    && chown -R dynamo:dynamo /workspace /models
WORKDIR /workspace
USER 65532:65532
CMD ["python3", "-m", "dynamo.native"]
