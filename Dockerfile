# tff_fssl on CPUs. Runs are written to the folder that is mounted at /work:
#   docker build --tag tff_fssl .
#   docker run --rm --user "$(id -u):$(id -g)" --volume "$PWD:/work" \
#     tff_fssl train --flagfile=configs/quickstart.flags
FROM python:3.11-slim-bookworm

RUN apt-get update \
    && apt-get install --yes --no-install-recommends make \
    && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1
WORKDIR /tff_fssl
# What `make setup` depends on; a change of the code does not repeat it.
COPY Makefile LICENSE README.md pyproject.toml setup.py ./
COPY requirements.txt requirements-ray.txt ./
COPY tools/find_python.sh tools/
COPY tff_fssl/__init__.py tff_fssl/
COPY configs configs
RUN make setup
# docker build --build-arg RAY=1: also for --runtime=ray.
ARG RAY=
RUN if [ -n "$RAY" ]; then make setup-ray; fi
COPY . .

ENV PATH=/tff_fssl/.venv/bin:$PATH HOME=/tmp
WORKDIR /work
ENTRYPOINT ["tff-fssl"]
CMD ["--help"]
