// Paged attention for any type and head size: one thread block for each row and head, in plain float32. It serves the
// shapes and types that the fast kernels (attention_decode.cu, attention_prefill.cu) do not, such as float32.
#include "elements.cuh"

#define WARPS 4
#define MINE ((HEAD_DIM + WARP - 1) / WARP)

// attended and q are (rows, heads, HEAD_DIM); `rows` lists the rows to compute. Row r attends to positions
// 0 … positions[r] of the sequence whose slots begin at tables[table_starts[r]], or to the last `window` of them. With
// SCORE_CAP, tanh bends scores to at most that.
extern "C" __global__ void attend_any(ELEMENT* attended, const ELEMENT* q, const ELEMENT* pages, const int* rows,
                                      const int* positions, const int* tables, const int* table_starts,
                                      long long slot_stride, long long layer_offset, int kv_heads, float scale,
                                      int window) {
  const int row = rows[blockIdx.y], head = blockIdx.x, heads = gridDim.x, kv_head = head / (heads / kv_heads);
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int* table = tables + table_starts[row];
  const ELEMENT* query = q + ((long long)row * heads + head) * HEAD_DIM;
  float own[MINE], mixed[MINE], greatest = -INFINITY, total = 0;
#pragma unroll
  for (int i = 0; i < MINE; i++) {
    own[i] = lane + i * WARP < HEAD_DIM ? wide(query[lane + i * WARP]) * scale : 0;
    mixed[i] = 0;
  }
  const int begin = WINDOWED ? max(0, positions[row] + 1 - window) : 0;
  for (int at = begin + warp; at <= positions[row]; at += WARPS) {
    const ELEMENT* key = pages + table[at / BLOCK_SIZE] * slot_stride + layer_offset +
                         ((long long)(at % BLOCK_SIZE) * kv_heads + kv_head) * HEAD_DIM;
    const ELEMENT* value = key + (long long)BLOCK_SIZE * kv_heads * HEAD_DIM;
    float score = 0;
#pragma unroll
    for (int i = 0; i < MINE; i++)
      if (lane + i * WARP < HEAD_DIM) score += own[i] * wide(key[lane + i * WARP]);
    score = warp_sum(score);
#ifdef SCORE_CAP
    score = SCORE_CAP * tanhf(score / SCORE_CAP);
#endif
    const float before = greatest;
    greatest = fmaxf(greatest, score);
    const float shrink = __expf(before - greatest), weight = __expf(score - greatest);
    total = total * shrink + weight;
#pragma unroll
    for (int i = 0; i < MINE; i++)
      if (lane + i * WARP < HEAD_DIM) mixed[i] = mixed[i] * shrink + weight * wide(value[lane + i * WARP]);
  }
  __shared__ float all_mixed[WARPS][HEAD_DIM], all_greatest[WARPS], all_totals[WARPS];
#pragma unroll
  for (int i = 0; i < MINE; i++)
    if (lane + i * WARP < HEAD_DIM) all_mixed[warp][lane + i * WARP] = mixed[i];
  all_greatest[warp] = greatest;
  all_totals[warp] = total;
  __syncthreads();
  for (int other = 0; other < WARPS; other++) greatest = fmaxf(greatest, all_greatest[other]);
  for (int at = threadIdx.x; at < HEAD_DIM; at += blockDim.x) {
    float sum = 0, weights = 0;
    for (int other = 0; other < WARPS; other++) {
      const float share = all_totals[other] == 0 ? 0 : __expf(all_greatest[other] - greatest);
      sum += share * all_mixed[other][at];
      weights += share * all_totals[other];
    }
    attended[((long long)row * heads + head) * HEAD_DIM + at] = narrow(weights == 0 ? 0 : sum / weights);
  }
}
