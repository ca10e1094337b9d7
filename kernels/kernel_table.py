"""All kernels with their example calls. A new kernel needs an entry."""

from tunekit.kernels import elementwise_cases, loss_cases, quantized_cases, sequence_cases

KERNELS = {
    kernel.name: kernel
    for module in (elementwise_cases, loss_cases, quantized_cases, sequence_cases)
    for kernel in module.KERNELS
}
