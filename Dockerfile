# The default model on a CPU: docker build -t dspark-ray . && docker run -p 8000:8000 dspark-ray
# A GPU, with the vLLM engine: --build-arg TORCH=torch --build-arg PACKAGES=vllm==0.32.0, and --gpus all when it runs.
# On a cluster (cluster/) every node runs this image, with `ray start` as its command.
FROM python:3.11-slim

ARG TORCH=torch==2.13.0
ARG PACKAGES=
# wget: KubeRay's probes.
RUN apt-get update && apt-get install -y --no-install-recommends g++ wget && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home dspark
WORKDIR /opt/dspark-ray
RUN pip install --no-cache-dir "$TORCH"
COPY --chown=dspark . .
RUN pip install --no-cache-dir -e . $PACKAGES && chown dspark .
# Outside the container nobody reaches its loopback.
RUN sed 's/host: 127.0.0.1/host: 0.0.0.0/' configs/smollm2-135m-cpu.yaml > configs/container.yaml
USER dspark
ENV OMP_WAIT_POLICY=PASSIVE
# The model, so that a start needs no network.
RUN dspark-ray fetch
EXPOSE 8000
HEALTHCHECK --interval=10s --start-period=180s CMD \
  python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=5)"
CMD ["dspark-ray", "serve", "configs/container.yaml"]
