// Paged attention of a chunk's rows, for 16-bit types: FlashAttention-2's loop (Dao, 2023) on mma.sync. cp.async copies
// keys and values from the pages into shared memory, the next tile while one is computed.
//
// It is causal: a row attends to the positions up to its own. Without CAUSAL, for images, all rows of a tile attend to all
// positions up to the one that is given for its first row.
//
// A thread block is one head of up to ROWS consecutive rows of one sequence; each warp has 16 of these rows. With WINDOWED
// a row attends to the last `window` positions alone, and the loop begins with the first tile that a row sees.
#include "tensor_cores.cuh"

#ifndef CAUSAL
#define CAUSAL 1
#endif
#define WARPS 8
#define ROWS (WARPS * 16)
#define TILE 64  // positions
#define CHUNKS (HEAD_DIM / 8)  // of 16 bytes in a row
#define TILE_ELEMENTS (TILE * HEAD_DIM)

__device__ __forceinline__ unsigned shared_address(const void* at) { return (unsigned)__cvta_generic_to_shared(at); }

// A row's chunks are permuted by the row's number, so that the 8 rows of a matrix load lie in different banks.
__device__ __forceinline__ unsigned chunk_address(unsigned tile, int row, int chunk) {
  return tile + (row * CHUNKS + (chunk ^ (row & 7))) * 16;
}

__device__ __forceinline__ void load_tile(unsigned keys, unsigned values, const ELEMENT* origin, const int* table,
                                          int first, int last, long long slot_stride, long long step) {
  for (int i = threadIdx.x; i < TILE * CHUNKS; i += WARPS * WARP) {
    const int row = i / CHUNKS, chunk = i % CHUNKS, at = min(first + row, last);
    const ELEMENT* from = origin + table[at / BLOCK_SIZE] * slot_stride + at % BLOCK_SIZE * step + chunk * 8;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(chunk_address(keys, row, chunk)), "l"(from));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(chunk_address(values, row, chunk)),
                 "l"(from + BLOCK_SIZE * step));
  }
  asm volatile("cp.async.commit_group;");
}

// tiles (n, 2): first row of the step and count of rows, at most ROWS. The last tiles have the most work and begin first.
extern "C" __global__ void __launch_bounds__(WARPS * WARP)
    attend_prefill(ELEMENT* attended, const ELEMENT* q, const ELEMENT* q_rest, const ELEMENT* pages, const int2* tiles,
                   const int* positions, const int* tables, const int* table_starts, long long slot_stride,
                   long long layer_offset, int kv_heads, float scale_log2, int window) {
  extern __shared__ __align__(128) ELEMENT shared[];  // two stages of keys and values
  const unsigned base = shared_address(shared), stage_bytes = 2 * TILE_ELEMENTS * sizeof(ELEMENT);
  const int2 rows = tiles[gridDim.y - 1 - blockIdx.y];
  const int head = blockIdx.x, heads = gridDim.x, kv_head = head / (heads / kv_heads);
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, c = lane % 4;
  const int start = positions[rows.x], last = CAUSAL ? start + rows.y - 1 : start;
  const int* table = tables + table_starts[rows.x];
  const long long step = (long long)kv_heads * HEAD_DIM;
  const ELEMENT* origin = pages + layer_offset + kv_head * HEAD_DIM;

  const int begin = WINDOWED ? max(0, start + 1 - window) / TILE * TILE : 0;
  load_tile(base, base + stage_bytes / 2, origin, table, begin, last, slot_stride, step);
  const int own = warp * 16 + g;  // and own + 8
  unsigned query[HEAD_DIM / 16][4], rest[REST ? HEAD_DIM / 16 : 1][4];
#pragma unroll
  for (int k = 0; k < HEAD_DIM / 16; k++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = rows.x + min(own + i % 2 * 8, rows.y - 1);
      const long long at = ((long long)row * heads + head) * HEAD_DIM + 16 * k + 2 * c + i / 2 * 8;
      query[k][i] = *(const unsigned*)(q + at);
      if constexpr (REST) rest[k][i] = *(const unsigned*)(q_rest + at);
    }
  float mixed[HEAD_DIM / 8][4] = {}, greatest[2] = {-INFINITY, -INFINITY}, totals[2] = {};

  for (int first = begin, stage = 0; first <= last; first += TILE, stage ^= 1) {
    const unsigned keys = base + stage * stage_bytes, values = keys + stage_bytes / 2;
    if (first + TILE <= last) {
      const unsigned next = base + (stage ^ 1) * stage_bytes;
      load_tile(next, next + stage_bytes / 2, origin, table, first + TILE, last, slot_stride, step);
      asm volatile("cp.async.wait_group 1;");
    } else {
      asm volatile("cp.async.wait_group 0;");
    }
    __syncthreads();
    float scores[TILE / 8][4] = {};
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++)
#pragma unroll
      for (int n = 0; n < TILE / 8; n += 2) {
        unsigned b[4];
        const unsigned from = chunk_address(keys, 8 * n + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2);
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                     : "r"(from));
        multiply(scores[n], query[k][0], query[k][1], query[k][2], query[k][3], b[0], b[1]);
        multiply(scores[n + 1], query[k][0], query[k][1], query[k][2], query[k][3], b[2], b[3]);
        if constexpr (REST) {
          multiply(scores[n], rest[k][0], rest[k][1], rest[k][2], rest[k][3], b[0], b[1]);
          multiply(scores[n + 1], rest[k][0], rest[k][1], rest[k][2], rest[k][3], b[2], b[3]);
        }
      }
    if (first + TILE - 1 > (CAUSAL ? start + warp * 16 : last)) {  // some row of this warp may not see all of the tile
#pragma unroll
      for (int n = 0; n < TILE / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (first + 8 * n + 2 * c + i % 2 > (CAUSAL ? start + own + i / 2 * 8 : last)) scores[n][i] = -INFINITY;
    }
    if (WINDOWED && first <= start + warp * 16 + 15 - window) {  // some row of this warp may be beyond some of the tile
#pragma unroll
      for (int n = 0; n < TILE / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (first + 8 * n + 2 * c + i % 2 <= start + own + i / 2 * 8 - window) scores[n][i] = -INFINITY;
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float before = greatest[r];
#pragma unroll
      for (int n = 0; n < TILE / 8; n++) greatest[r] = fmaxf(greatest[r], fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
      greatest[r] = fmaxf(greatest[r], __shfl_xor_sync(EVERY_LANE, greatest[r], 1));
      greatest[r] = fmaxf(greatest[r], __shfl_xor_sync(EVERY_LANE, greatest[r], 2));
      // A row that has seen nothing yet has no greatest score; any finite level gives its scores the weight 0.
      const float top = WINDOWED && greatest[r] == -INFINITY ? 0 : greatest[r];
      const float shrink = exp2f((before - top) * scale_log2), level = top * scale_log2;
      totals[r] *= shrink;
#pragma unroll
      for (int n = 0; n < TILE / 8; n++)
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; i++) totals[r] += scores[n][i] = exp2f(scores[n][i] * scale_log2 - level);
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; n++) mixed[n][2 * r] *= shrink, mixed[n][2 * r + 1] *= shrink;
    }
#pragma unroll
    for (int k = 0; k < TILE / 16; k++) {
      const unsigned a0 = paired(scores[2 * k][0], scores[2 * k][1]), a1 = paired(scores[2 * k][2], scores[2 * k][3]);
      const unsigned a2 = paired(scores[2 * k + 1][0], scores[2 * k + 1][1]);
      const unsigned a3 = paired(scores[2 * k + 1][2], scores[2 * k + 1][3]);
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; n += 2) {
        unsigned b[4];
        const unsigned from = chunk_address(values, 16 * k + lane / 8 % 2 * 8 + lane % 8, n + lane / 16);
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                     : "r"(from));
        multiply(mixed[n], a0, a1, a2, a3, b[0], b[1]);
        multiply(mixed[n + 1], a0, a1, a2, a3, b[2], b[3]);
      }
    }
    __syncthreads();  // before the stage is overwritten
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float total = totals[r];
    total += __shfl_xor_sync(EVERY_LANE, total, 1);
    total += __shfl_xor_sync(EVERY_LANE, total, 2);
    if (own + 8 * r >= rows.y) continue;
    ELEMENT* to = attended + ((long long)(rows.x + own + 8 * r) * heads + head) * HEAD_DIM + 2 * c;
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n++)
      *(unsigned*)(to + 8 * n) = paired(mixed[n][2 * r] / total, mixed[n][2 * r + 1] / total);
  }
}
