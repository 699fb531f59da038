// The kernels that treat each row of a step by itself, between the matrix products.
#include "elements.cuh"

// to (count, 4) = from, which lies in host memory.
extern "C" __global__ void fetch(int4* to, const int4* from, int count) {
  for (int at = blockIdx.x * blockDim.x + threadIdx.x; at < count; at += gridDim.x * blockDim.x) to[at] = from[at];
}

// hidden (rows, width) float32 = embedding[tokens].
extern "C" __global__ void embed(float* hidden, const ELEMENT* embedding, const int* tokens, int width) {
  const ELEMENT* from = embedding + (long long)tokens[blockIdx.x] * width;
  float* to = hidden + (long long)blockIdx.x * width;
  for (int at = threadIdx.x * PACK; at < width; at += blockDim.x * PACK) {
    const Pack pack = *(const Pack*)(from + at);
    FloatPack floats;
#pragma unroll
    for (int i = 0; i < PACK; i++) floats.of[i] = wide(pack.of[i]);
    *(FloatPack*)(to + at) = floats;
  }
}

// normed (rows, width) = RMSNorm of hidden's rows, or of the `picked` ones. A bias, if there is one, is first added to
// hidden itself: it belongs to the product that was just accumulated there.
extern "C" __global__ void rms_norm(ELEMENT* normed, float* hidden, const float* bias, const float* weight,
                                    const int* picked, int width, float epsilon) {
  __shared__ float sums[WARP];
  float* row = hidden + (long long)(picked ? picked[blockIdx.x] : blockIdx.x) * width;
  float sum = 0;
  for (int at = threadIdx.x * PACK; at < width; at += blockDim.x * PACK) {
    FloatPack pack = *(FloatPack*)(row + at);
    if (bias) {
#pragma unroll
      for (int i = 0; i < PACK; i++) pack.of[i] += bias[at + i];
      *(FloatPack*)(row + at) = pack;
    }
#pragma unroll
    for (int i = 0; i < PACK; i++) sum += pack.of[i] * pack.of[i];
  }
  sum = warp_sum(sum);
  if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = sum;
  __syncthreads();
  sum = warp_sum(threadIdx.x % WARP < blockDim.x / WARP ? sums[threadIdx.x % WARP] : 0);
  const float scale = rsqrtf(sum / width + epsilon);
  ELEMENT* to = normed + (long long)blockIdx.x * width;
  for (int at = threadIdx.x * PACK; at < width; at += blockDim.x * PACK) {
    const FloatPack floats = *(const FloatPack*)(row + at), factors = *(const FloatPack*)(weight + at);
    Pack pack;
#pragma unroll
    for (int i = 0; i < PACK; i++) pack.of[i] = narrow(floats.of[i] * scale * factors.of[i]);
    *(Pack*)(to + at) = pack;
  }
}

// sums (spans, width) float64, in host memory = the sum of each span (first row, rows) of normed (rows, width).
extern "C" __global__ void sum_rows(double* sums, const ELEMENT* normed, const int2* spans, int width) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= width) return;
  const int2 span = spans[blockIdx.y];
  const ELEMENT* from = normed + (long long)span.x * width + column;
  double sum = 0;
#pragma unroll 8
  for (int row = 0; row < span.y; row++) sum += wide(from[(long long)row * width]);
  sums[(long long)blockIdx.y * width + column] = sum;
}

// activated (rows, width) = silu(gate) · up, where gate_up (rows, 2 · width) float32 holds the gate, then up.
extern "C" __global__ void swiglu(ELEMENT* activated, const float* gate_up, int width) {
  const int at = (blockIdx.y * blockDim.x + threadIdx.x) * PACK;
  if (at >= width) return;
  const float* row = gate_up + (long long)blockIdx.x * 2 * width;
  const FloatPack gate = *(const FloatPack*)(row + at), up = *(const FloatPack*)(row + width + at);
  Pack pack;
#pragma unroll
  for (int i = 0; i < PACK; i++) pack.of[i] = narrow(silu(gate.of[i]) * up.of[i]);
  *(Pack*)(activated + (long long)blockIdx.x * width + at) = pack;
}

// Adds biases to q, k and v and rotates q and k in Hugging Face's order (pairs i, i + HEAD_DIM / 2). Writes q, with its
// rounding errors (REST), and writes k and v to their places in the paged cache. qkv is (rows, heads + 2 · kv_heads,
// HEAD_DIM) float32; place = slot · BLOCK_SIZE + offset. A row with position -1 is padding and leaves no trace.
extern "C" __global__ void rotate_and_store(ELEMENT* q, ELEMENT* q_rest, ELEMENT* pages, const float* qkv, const float* bias,
                                            const float* cosines, const float* sines, const int* positions,
                                            const int* places, long long slot_stride, long long layer_offset, int heads,
                                            int kv_heads) {
  const int half = HEAD_DIM / 2, row = blockIdx.x, position = positions[row];
  const int pair = blockIdx.y * blockDim.x + threadIdx.x, head = pair / half, i = pair % half;
  if (position < 0 || head >= heads + 2 * kv_heads) return;
  const int column = head * HEAD_DIM + i;
  const float* from = qkv + (long long)row * (heads + 2 * kv_heads) * HEAD_DIM + column;
  float low = from[0], high = from[half];
  if (bias) low += bias[column], high += bias[column + half];
  if (head < heads + kv_heads) {
    const float cosine = cosines[(long long)position * half + i], sine = sines[(long long)position * half + i];
    const float turned = low * cosine - high * sine;
    high = high * cosine + low * sine;
    low = turned;
  }
  ELEMENT* to;
  if (head < heads) {
    const long long at = ((long long)row * heads + head) * HEAD_DIM;
    to = q + at;
    if (REST) {
      q_rest[at + i] = narrow(low - wide(narrow(low)));
      q_rest[at + i + half] = narrow(high - wide(narrow(high)));
    }
  } else {
    const int place = places[row], kv_head = (head - heads) % kv_heads, values = head >= heads + kv_heads;
    to = pages + (long long)(place / BLOCK_SIZE) * slot_stride + layer_offset +
         ((long long)(values * BLOCK_SIZE + place % BLOCK_SIZE) * kv_heads + kv_head) * HEAD_DIM;
  }
  to[i] = narrow(low);
  to[i + half] = narrow(high);
}
