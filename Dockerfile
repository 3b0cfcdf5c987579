# One image for router, sidecar and worker.
FROM python:3.13-slim
WORKDIR /opt/warmroute
COPY requirements/runtime.lock requirements/build.lock requirements/
RUN pip install --no-cache-dir --require-hashes -r requirements/runtime.lock -r requirements/build.lock
COPY pyproject.toml README.md LICENSE ./
COPY state state
COPY policies policies
COPY prompt prompt
COPY router router
COPY sidecar sidecar
COPY warmroute warmroute
RUN pip install --no-cache-dir --no-deps --no-build-isolation . && useradd --system warmroute
USER warmroute
ENTRYPOINT ["warmroute"]
