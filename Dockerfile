# syntax=docker/dockerfile:1
# epochgate: docker build --tag epochgate .
# A package mirror or a private CA is the builder's own: mount them, for example as the secrets pip.conf and ca.crt.

FROM python:3.13-slim-trixie AS build
WORKDIR /source
COPY deploy/image/build.txt requirements/run.txt ./
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    python -m venv /build \
    && /build/bin/pip install --no-cache-dir --require-hashes -r build.txt \
    && python -m venv /opt/epochgate \
    && /opt/epochgate/bin/pip install --no-cache-dir --require-hashes -r run.txt
COPY pyproject.toml README.md LICENSE ./
COPY proxy proxy
RUN /build/bin/pip wheel --no-cache-dir --no-index --no-deps --no-build-isolation --wheel-dir /wheels . \
    && /opt/epochgate/bin/pip install --no-cache-dir --no-index --no-deps /wheels/*.whl \
    && /opt/epochgate/bin/pip uninstall --yes pip \
    && /build/bin/cyclonedx-py environment /opt/epochgate/bin/python --pyproject pyproject.toml \
       --output-reproducible --output-format JSON --output-file /opt/epochgate/sbom.cdx.json \
    && /opt/epochgate/bin/python -m compileall -q /opt/epochgate/lib

FROM python:3.13-slim-trixie
ARG VERSION=dev
LABEL org.opencontainers.image.title="epochgate" \
      org.opencontainers.image.description="A reverse proxy for MCP over Streamable HTTP that lets no spliced stream through" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
# The base brings pip; nothing is installed in a running image.
RUN rm -rf /usr/local/bin/pip* /usr/local/lib/python3*/site-packages/pip* /usr/local/lib/python3*/ensurepip
COPY --from=build /opt/epochgate /opt/epochgate
COPY deploy/image/epochgate.yaml /etc/epochgate/epochgate.yaml
# Nothing is written: no byte code, no home, no temporary file. A sqlite store needs a volume of its own.
ENV PATH=/opt/epochgate/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 65532:65532
EXPOSE 8080 9090
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s --retries=3 \
    CMD ["/opt/epochgate/bin/python", "-c", "import http.client, sys; c = http.client.HTTPConnection('127.0.0.1', 9090, timeout=2); c.request('GET', '/livez'); sys.exit(c.getresponse().status != 200)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["/opt/epochgate/bin/epochgate"]
CMD ["serve", "--config", "/etc/epochgate/epochgate.yaml"]
