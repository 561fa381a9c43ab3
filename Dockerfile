# tff_fssl on CPUs. Runs are written to the folder that is mounted at /work:
#   docker build --tag tff_fssl .
#   docker run --rm --user "$(id -u):$(id -g)" --volume "$PWD:/work" \
#     tff_fssl train --flagfile=configs/quickstart.flags
# With more parts of the installation (gpu, ray, track, flower):
#   docker build --tag tff_fssl:cuda --build-arg PARTS="gpu ray" .
# GPUs need the NVIDIA container toolkit, and `docker run --gpus all`.
FROM python:3.13-slim-bookworm

RUN apt-get update \
    && apt-get install --yes --no-install-recommends make \
    && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1
# What the toolkit gives a container.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /tff_fssl
# What `make setup` depends on; a change of the code does not repeat it.
COPY Makefile LICENSE README.md pyproject.toml setup.py requirements*.txt ./
COPY tools/find_python.sh tools/
COPY tff_fssl/__init__.py tff_fssl/
COPY configs configs
RUN make setup
ARG PARTS=
RUN for part in $PARTS; do make setup-$part || exit 1; done
COPY . .

ENV PATH=/tff_fssl/.venv/bin:$PATH HOME=/tmp
WORKDIR /work
ENTRYPOINT ["tff-fssl"]
CMD ["--help"]
