# Workers of SGLang; the base image brings SGLang and its torch.
# Not built by the tests, which have no container engine: they lint this file, and check the steps that need none.
ARG BASE=lmsysorg/sglang:v0.5.3
FROM ${BASE}
ARG EXTRAS=etcd,nats,kubernetes,planner,otel
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 HF_HOME=/models
WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src ./src
# The base image decides the versions of torch and its like: our constraints would replace them.
# hadolint ignore=DL3013
RUN pip install ".[${EXTRAS}]" && rm -rf /src/*
# The folders that manifests name as their working directory.
RUN mkdir -p /workspace/components/backends/sglang /workspace/components/src/dynamo/planner /workspace/examples/backends/sglang /models \
    && cp "$(python3 -c 'import importlib.util as u; print(u.find_spec("dynamo.planner.planner_sla").origin)')" /workspace/components/src/dynamo/planner/ \
    && useradd --uid 65532 --user-group --create-home dynamo \
    && chown -R dynamo:dynamo /workspace /models
WORKDIR /workspace
USER 65532:65532
ENTRYPOINT []
CMD ["python3", "-m", "dynamo.sglang"]
