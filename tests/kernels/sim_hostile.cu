// Kernels that do what no kernel should, for the tests of the simulated device.
#include "gpunet.cuh"

// Never ends, in one way or another.
extern "C" __global__ void endless(float* y, int32* flag, int32 kind) {
  volatile float* out = y;
  if (kind == 0)
    for (;;) out[0] = out[0] + 1;
  if (kind == 1)
    for (;;) out[0] = sinf(out[0] + 1);
  if (kind == 2)
    for (;;) __syncthreads();
  if (kind == 3)
    for (;;) out[0] = (float)__ballot_sync(0xffffffffu, threadIdx.x > 3);
  if (kind == 4) {
    // Waits for a block that runs after this one.
    if (blockIdx.x == gridDim.x - 1) atomicExch(flag, 1);
    while (atomicAdd(flag, 0) == 0) {
    }
  }
}

extern "C" __global__ void many_blocks(float* y) { y[0] += 1; }

// A local array that does not fit on the stack.
extern "C" __global__ void large_frame(float* y, int32 index) {
  volatile float local[100000];
  local[index] = y[0];
  y[0] = local[index / 2];
}

extern "C" __global__ void much_shared(float* y) {
  __shared__ float tile[10000];
  __shared__ double more[1200];
  tile[threadIdx.x] = y[0];
  more[threadIdx.x] = tile[threadIdx.x];
  y[0] = (float)more[threadIdx.x];
}

// 64 GiB.
extern "C" __global__ void vast_shared(float* y) {
  __shared__ float tile[1024][1024][1024][16];
  tile[0][0][0][threadIdx.x] = y[0];
  y[0] = tile[0][0][0][threadIdx.x];
}

extern "C" __global__ void call_address(float* y, int64 address) { y[0] = ((float (*)(float))address)(y[0]); }

extern "C" __global__ void misaligned(const float* x, float* y, int64 bytes) {
  y[0] = *(const float*)((const char*)x + bytes);
}

extern "C" __global__ void misaligned_vector(const float* x, float* y, int64 floats) {
  *(float4*)y = *(const float4*)(x + floats);
}

extern "C" __global__ void say(int32 number) { printf("number %d of block %d\n", number, (int)blockIdx.x); }

extern "C" __global__ void give_up(float* y) {
  if (threadIdx.x == 2) __trap();
  y[threadIdx.x] = 1;
}
