# syntax=docker/dockerfile:1
# The server on processors: docker build -t flyspec . && docker run --rm -p 8000:8000 -e FLY_API_KEY flyspec
# docs/how-to/deploy.md says how to run it for others, and have it started again when it ends (--restart always). With
# --build-arg TORCH_INDEX=https://pypi.org/simple it has PyTorch's CUDA build instead, for containers with a GPU.

ARG PYTHON=3.13

FROM python:${PYTHON}-slim-bookworm AS build
# A C++17 compiler builds the kernels; without one they would be left out, and PyTorch be used instead.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/fly
ENV PATH=/opt/fly/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
# What changes seldom comes first. The CPU build of torch is on its project's own index; the package is content with it.
COPY constraints.txt ./
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --constraint constraints.txt --extra-index-url ${TORCH_INDEX} torch
COPY pyproject.toml setup.py README.md LICENSE ./
COPY fly fly
RUN pip install --constraint constraints.txt . \
    # An image without the kernels would be slow and say nothing of it.
    && cd / && python -c "import pathlib, fly; k = pathlib.Path(fly.__file__).parent / 'backends/cpu'; \
assert list(k.glob('_library*.so')) or '$(uname -m)' != 'x86_64', (k / 'not_built.txt').read_text()"

FROM python:${PYTHON}-slim-bookworm
COPY --from=build /opt/fly /opt/fly
# Models from the Hugging Face hub are kept in /models: mount a volume there.
ENV PATH=/opt/fly/bin:$PATH HF_HOME=/models PYTHONUNBUFFERED=1
RUN useradd --uid 10001 --create-home fly && install --directory --owner=fly /models
USER 10001
WORKDIR /home/fly
VOLUME /models
EXPOSE 8000
# Alive is /health; /ready says whether new requests are taken, and belongs to whoever routes them.
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# The process is the container's first, hears SIGTERM itself and drains: give it time (docs/how-to/deploy.md).
STOPSIGNAL SIGTERM
ENTRYPOINT ["fly", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD ["--model", "fly-target", "--draft", "fly-draft", "--drain-timeout", "50"]
