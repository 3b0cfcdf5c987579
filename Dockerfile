# One image for router, sidecar and worker. Packages are those of the lock files, by their hashes.
# Pin the base by its digest where you build: --build-arg BASE=python:3.13-slim-bookworm@sha256:...
ARG BASE=python:3.13-slim-bookworm
# The same with a C compiler, for the helper of the index; BUILD_BASE=$BASE makes an image without it.
ARG BUILD_BASE=python:3.13-bookworm

FROM ${BUILD_BASE} AS build
WORKDIR /src
RUN python -m venv /opt/warmroute
COPY requirements/runtime.lock requirements/build.lock requirements/
RUN /opt/warmroute/bin/pip install --no-cache-dir --require-hashes -r requirements/runtime.lock \
 && python -m venv /build \
 && /build/bin/pip install --no-cache-dir --require-hashes -r requirements/build.lock
COPY pyproject.toml README.md LICENSE ./
COPY state state
COPY policies policies
COPY prompt prompt
COPY router router
COPY sidecar sidecar
COPY replay replay
COPY warmroute warmroute
RUN /build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels . \
 && /opt/warmroute/bin/pip install --no-cache-dir --no-deps --no-index /wheels/*.whl \
 && /opt/warmroute/bin/pip uninstall --yes pip
RUN cd / && { /opt/warmroute/bin/python -m warmroute.native || true; }

FROM ${BASE}
LABEL org.opencontainers.image.title=warmroute org.opencontainers.image.licenses=Apache-2.0
COPY --from=build /opt/warmroute /opt/warmroute
ENV PATH=/opt/warmroute/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
EXPOSE 8080 8081
STOPSIGNAL SIGTERM
# Of a router. Sidecars and workers are asked elsewhere: docker-compose.yml has how.
HEALTHCHECK --interval=5s --timeout=5s --start-period=30s --retries=3 \
  CMD ["warmroute", "health", "--url", "http://127.0.0.1:8080/livez"]
ENTRYPOINT ["warmroute"]
