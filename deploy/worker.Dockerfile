# A worker. On a GPU host torch's own wheel brings the CUDA libraries; FLAVOUR only documents which one was built.
ARG FLAVOUR=cpu
FROM python:3.12-slim AS build
WORKDIR /src
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml hatch_build.py README.md LICENSE requirements.lock ./
COPY precis precis
COPY service service
COPY workers workers
RUN python -m venv /opt/precis \
    && /opt/precis/bin/pip install --no-cache-dir --constraint requirements.lock "$(grep ^torch== requirements.lock)" \
    && /opt/precis/bin/pip install --no-cache-dir --no-deps -r requirements.lock \
    && /opt/precis/bin/pip install --no-cache-dir --no-deps --no-build-isolation .

FROM python:3.12-slim
ARG FLAVOUR
LABEL org.opencontainers.image.title="precis-worker-${FLAVOUR}"
RUN useradd --system --uid 10001 --no-create-home precis && mkdir /data && chown precis /data
COPY --from=build /opt/precis /opt/precis
USER 10001
VOLUME /data
ENV PRECIS_DATA_DIR=/data HF_HOME=/data/huggingface PYTHONUNBUFFERED=1
EXPOSE 9108
HEALTHCHECK --interval=10s --timeout=3s --start-period=300s CMD ["/opt/precis/bin/python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9108/metrics', timeout=2)"]
CMD ["sh", "-c", "/opt/precis/bin/python -m workers.unpack /data && exec /opt/precis/bin/python -m workers"]
