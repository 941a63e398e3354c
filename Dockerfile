# nanguard with a CPU torch: docker build -t nanguard . && docker run --rm -v "$PWD:/work" nanguard check
# For GPUs, start from an image that has torch: docker build --build-arg BASE=pytorch/pytorch --build-arg EXTRA= .
ARG BASE=python:3.12-slim
FROM ${BASE}
ARG EXTRA=torch,
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu ".[${EXTRA}scan,serve]"
WORKDIR /work
ENTRYPOINT ["nanguard"]
CMD ["--help"]
