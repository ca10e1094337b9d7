# docker build -t tunekit . && docker run --gpus all --ipc host -v "$PWD:/work" tunekit run sft nano/tools_lora
FROM python:3.12-slim
# Kernels are compiled on first use: Triton needs a C compiler, the CPU kernels a C++ compiler.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN pip install --no-cache-dir "/src[gguf,tensorboard,wandb]" && rm -rf /src
WORKDIR /work
ENTRYPOINT ["tune"]
