// The kernels of a vision tower that are neither matrix products nor attention. A step has `images` images of
// `positions` rows each. WIDTH is the tower's width, PACK divides it; biases and norms are float32.
#include "elements.cuh"

#define QUICK_GELU 0
#define GELU_EXACT 1
#define GELU_TANH 2

__device__ __forceinline__ float activated(float x, int kind) {
  if (kind == QUICK_GELU) return x / (1 + __expf(-1.702f * x));
  if (kind == GELU_EXACT) return 0.5f * x * (1 + erff(x * 0.7071067812f));
  return 0.5f * x * (1 + tanhf(0.7978845608f * x * (1 + 0.044715f * x * x)));
}

// patches (images · side², row) = scaled and normed pixels of RGB bytes (images, size, size, 3). A row of a patch has its
// colours one after the other, and zeros from 3 · patch² on.
extern "C" __global__ void cut_patches(ELEMENT* patches, const unsigned char* pixels, int size, int patch, int side,
                                       int row, float scale, float mean_r, float mean_g, float mean_b,
                                       float deviation_r, float deviation_g, float deviation_b) {
  const int number = blockIdx.x, image = number / (side * side), top = number / side % side * patch;
  const int left = number % side * patch;
  const float means[3] = {mean_r, mean_g, mean_b}, deviations[3] = {deviation_r, deviation_g, deviation_b};
  for (int at = threadIdx.x; at < row; at += blockDim.x) {
    const int colour = at / (patch * patch), y = top + at / patch % patch, x = left + at % patch;
    float value = 0;
    if (colour < 3)
      value = (pixels[(((long long)image * size + y) * size + x) * 3 + colour] * scale - means[colour]) / deviations[colour];
    patches[(long long)number * row + at] = narrow(value);
  }
}

// hidden (images · positions, width) = class, if there is one, and embedded patches (images · patches, width) + bias, if
// there is one; + the embedding of the position.
extern "C" __global__ void place_patches(float* hidden, const float* embedded, const float* first, const float* bias,
                                         const float* position, int positions, int width) {
  const int row = blockIdx.x, image = row / positions, place = row % positions, before = first ? 1 : 0;
  const float* from = embedded + ((long long)image * (positions - before) + place - before) * width;
  for (int at = threadIdx.x; at < width; at += blockDim.x) {
    const float value = place < before ? first[at] : from[at] + (bias ? bias[at] : 0);
    hidden[(long long)row * width + at] = value + position[(long long)place * width + at];
  }
}

// normed (rows, width) = LayerNorm of hidden's rows; without `normed` they are replaced. A bias, if there is one, is first
// added to hidden itself: it belongs to the product that was just accumulated there. A warp has a row.
extern "C" __global__ void layer_norm(ELEMENT* normed, float* hidden, const float* bias, const float* weight,
                                      const float* shift, int rows, int width, float epsilon) {
  const int number = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
  if (number >= rows) return;
  float* row = hidden + (long long)number * width;
  float sum = 0, squares = 0;
  for (int at = lane * PACK; at < width; at += WARP * PACK) {
    FloatPack pack = *(FloatPack*)(row + at);
    if (bias) {
      const FloatPack more = *(const FloatPack*)(bias + at);
#pragma unroll
      for (int i = 0; i < PACK; i++) pack.of[i] += more.of[i];
      *(FloatPack*)(row + at) = pack;
    }
#pragma unroll
    for (int i = 0; i < PACK; i++) sum += pack.of[i];
  }
  const float mean = warp_sum(sum) / width;
  for (int at = lane * PACK; at < width; at += WARP * PACK) {
    const FloatPack pack = *(const FloatPack*)(row + at);
#pragma unroll
    for (int i = 0; i < PACK; i++) squares += (pack.of[i] - mean) * (pack.of[i] - mean);
  }
  const float scale = rsqrtf(warp_sum(squares) / width + epsilon);
  for (int at = lane * PACK; at < width; at += WARP * PACK) {
    FloatPack pack = *(const FloatPack*)(row + at);
    const FloatPack factors = *(const FloatPack*)(weight + at), shifts = *(const FloatPack*)(shift + at);
    Pack narrowed;
#pragma unroll
    for (int i = 0; i < PACK; i++) {
      pack.of[i] = (pack.of[i] - mean) * scale * factors.of[i] + shifts.of[i];
      narrowed.of[i] = narrow(pack.of[i]);
    }
    if (normed) *(Pack*)(normed + (long long)number * width + at) = narrowed;
    else *(FloatPack*)(row + at) = pack;
  }
}

// q (rows, width) = the first third of qkv's rows + bias. Keys and values go to pages (slots, 2, BLOCK_SIZE, width), of
// which each image has `slots`, one after the other.
extern "C" __global__ void store_heads(ELEMENT* q, ELEMENT* pages, const ELEMENT* qkv, const float* bias, int positions,
                                       int slots, int width) {
  const int row = blockIdx.x, image = row / positions, place = row % positions;
  const long long slot = (long long)image * slots + place / BLOCK_SIZE;
  ELEMENT* page = pages + (slot * 2 * BLOCK_SIZE + place % BLOCK_SIZE) * width;
  for (int at = threadIdx.x * PACK; at < 3 * width; at += blockDim.x * PACK) {
    Pack pack = *(const Pack*)(qkv + (long long)row * 3 * width + at);
#pragma unroll
    for (int i = 0; i < PACK; i++) pack.of[i] = narrow(wide(pack.of[i]) + bias[at + i]);
    const int part = at / width, column = at % width;
    ELEMENT* to = part == 0 ? q + (long long)row * width : page + (part - 1) * BLOCK_SIZE * width;
    *(Pack*)(to + column) = pack;
  }
}

// x (rows, width) = activation of x + bias, if there is one.
extern "C" __global__ void activate_rows(ELEMENT* x, const float* bias, int width, int kind) {
  ELEMENT* row = x + (long long)blockIdx.x * width;
  for (int at = (blockIdx.y * blockDim.x + threadIdx.x) * PACK; at < width; at += gridDim.y * blockDim.x * PACK) {
    Pack pack = *(const Pack*)(row + at);
#pragma unroll
    for (int i = 0; i < PACK; i++) pack.of[i] = narrow(activated(wide(pack.of[i]) + (bias ? bias[at + i] : 0), kind));
    *(Pack*)(row + at) = pack;
  }
}

// features (images · (positions - drops), stride), from `column` on, = hidden + bias, if there is one, without the first
// `drops` positions of each image.
extern "C" __global__ void take_features(ELEMENT* features, const float* hidden, const float* bias, int positions, int drops,
                                         int width, int stride, int column) {
  const int number = blockIdx.x, kept = positions - drops;
  const float* row = hidden + ((long long)(number / kept) * positions + number % kept + drops) * width;
  ELEMENT* to = features + (long long)number * stride + column;
  for (int at = threadIdx.x; at < width; at += blockDim.x) to[at] = narrow(row[at] + (bias ? bias[at] : 0));
}

// x (rows, width) += bias.
extern "C" __global__ void add_bias(float* x, const float* bias, int width) {
  for (int at = threadIdx.x; at < width; at += blockDim.x) x[(long long)blockIdx.x * width + at] += bias[at];
}
