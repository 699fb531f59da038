// Causal paged attention of a chunk's rows in bfloat16 with heads of 128, with what only Hopper has: matrix instructions
// that run beside the threads that started them, on shared memory (wgmma). After FlashAttention-3 (Shah et al., 2024).
//
// A thread block is one head of up to ROWS consecutive rows of one sequence. One of its first four warps has the copy
// engine bring tiles of keys and values from the pages into a ring of slots; two groups of four warps compute, 64 rows
// each. While the tensor cores multiply the next keys and the last weights, the threads compute the weights between them.
//
//     ring       keys 0 │ keys 1 │ values 0 │ keys 2 │ values 1 │ …      full: by the copy engine; empty: by the warps
//
// With WINDOWED a row attends to the last `window` positions alone, and the loop begins with the first tile that a row sees.
#define ROWS 128
#define TILE 128  // positions
#define HEAD_DIM 128
#define SLOTS 5
#define TILE_BYTES (TILE * HEAD_DIM * 2)
#define PANEL_BYTES (TILE * 128)  // 64 columns of a tile: rows of 128 bytes
#define BOX 16                    // positions that are copied together; blocks are multiples of it
#define GROUP_THREADS 128

#define INFINITY __int_as_float(0x7f800000)
#define EVERY_LANE 0xffffffffu
typedef unsigned short ELEMENT;
typedef unsigned long long ull;

__device__ __forceinline__ void init_barrier(unsigned at, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count));
}

__device__ __forceinline__ void arrive(unsigned at) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}

// Arrives and announces bytes, which must be there too before the barrier's phase ends.
__device__ __forceinline__ void expect(unsigned at, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait_barrier(unsigned at, unsigned parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(at), "r"(parity)
      : "memory");
}

// The place in the ring: which slot, and how often it was used, as a parity.
struct Place {
  int slot;
  unsigned parity;
  __device__ __forceinline__ void advance() {
    if (++slot == SLOTS) slot = 0, parity ^= 1;
  }
};

// Rows of 128 bytes whose 16-byte chunks are permuted by the row's number (a swizzle of 128 bytes), as matrix
// instructions read them. Keys: 8 rows are `stride` apart. Values, which are read transposed: also panels `lead` apart.
__device__ __forceinline__ ull described(unsigned at, unsigned lead, unsigned stride) {
  return (ull)(at >> 4 & 0x3fff) | (ull)(lead >> 4) << 16 | (ull)(stride >> 4) << 32 | 1ull << 62;
}

__device__ __forceinline__ void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most LEFT groups of products are under way. What they wrote must be held after it.
template <int LEFT>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Keeps the compiler from moving uses of the numbers over this line.
__device__ __forceinline__ void hold(float (&d)[64]) {
#pragma unroll
  for (int i = 0; i < 64; i++) asm volatile("" : "+f"(d[i])::"memory");
}

#define PRODUCT "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
#define NUMBERS \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},"
#define HELD(d) \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
  "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
  "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
  "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])

// Begins d (64, 128) = a (64, 16) · b (16, 128), both in shared memory, added to d with `add`.
__device__ __forceinline__ void begin_product(float (&d)[64], ull a, ull b, int add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n" PRODUCT NUMBERS "%64, %65, p, 1, 1, 0, 0;\n}"
               : HELD(d)
               : "l"(a), "l"(b), "r"(add));
}

// Begins d += a · b with a in registers, whose rows and columns lie as tensor_cores.cuh says, and b's columns contiguous.
__device__ __forceinline__ void begin_adding(float (&d)[64], const unsigned (&a)[4], ull b) {
  asm volatile(PRODUCT NUMBERS "{%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
               : HELD(d)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ unsigned paired(float low, float high) {
  unsigned both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Begins to copy BOX positions of 64 columns. `map` describes the pages as (slot, layer and part, position, head, column).
__device__ __forceinline__ void copy_box(unsigned to, unsigned full, const void* map, int column, int head, int position,
                                         int part, int slot) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5,%6,%7}], [%2];" ::
          "r"(to), "l"(map), "r"(full), "r"(column), "r"(head), "r"(position), "r"(part), "r"(slot)
      : "memory");
}

// What the copying warp does. `part` is the layer's keys in the map; values come next. Each lane copies one box of both
// halves of the columns. Positions behind `last` are only copied if they are in its box.
__device__ void copy_tiles(unsigned ring, unsigned full, unsigned empty, const void* map, int part, int head,
                           const int* table, int begin, int last) {
  const int lane = threadIdx.x, tiles = (last - begin) / TILE + 1;
  // The map was written by a copy, where another one may have been before.
  asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(map) : "memory");
  Place to = {0, 1};  // a wait for the parity of a phase before the first returns at once
  // keys 0, keys 1, values 0, …, keys n - 1, values n - 2, values n - 1
  for (int item = 0; item < 2 * tiles; item++) {
    const bool values = item == 2 * tiles - 1 || (item > 1 && item % 2 == 0);
    const int tile = item == 2 * tiles - 1 ? tiles - 1 : values ? item / 2 - 1 : (item + 1) / 2;
    const int first = begin + tile * TILE, boxes = min(TILE, last - first + BOX) / BOX, at = first + lane * BOX;
    const int slot = lane < boxes ? table[at / BLOCK_SIZE] : 0;
    wait_barrier(empty + 8 * to.slot, to.parity);
    if (lane == 0) expect(full + 8 * to.slot, boxes * BOX * HEAD_DIM * 2);
    __syncwarp();
    if (lane < boxes) {
      const unsigned target = ring + to.slot * TILE_BYTES + lane * BOX * 128;
      for (int half = 0; half < 2; half++)
        copy_box(target + half * PANEL_BYTES, full + 8 * to.slot, map, 64 * half, head, at % BLOCK_SIZE, part + values, slot);
    }
    to.advance();
  }
}

// Writes zeros over the rows of a tile from `first` on, by both computing groups.
__device__ void clear_rows(unsigned tile, int first) {
  for (int at = first * 16 + threadIdx.x - GROUP_THREADS; at < TILE * 16; at += 2 * GROUP_THREADS) {
    const unsigned to = tile + at % 2 * PANEL_BYTES + at / 16 * 128 + at / 2 % 8 * 16;
    asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(to), "r"(0) : "memory");
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // matrix instructions read by another way
  asm volatile("bar.sync 1, %0;" ::"n"(2 * GROUP_THREADS) : "memory");
}

// Begins 64 rows of queries times the keys in a slot.
__device__ __forceinline__ void begin_scores(float (&scores)[64], unsigned queries, unsigned slot) {
#pragma unroll
  for (int k = 0; k < 8; k++) {
    const int at = k / 4 * PANEL_BYTES + k % 4 * 32;
    begin_product(scores, described(queries + at, 16, 1024), described(slot + at, 16, 1024), k > 0);
  }
}

// Begins to add 64 rows of weights times the values in a slot.
__device__ __forceinline__ void begin_mixing(float (&mixed)[64], const unsigned (&weights)[8][4], unsigned slot) {
#pragma unroll
  for (int k = 0; k < 8; k++) begin_adding(mixed, weights[k], described(slot + k * 2048, PANEL_BYTES, 1024));
}

// tiles (n, 2): first row of the step and count of rows, at most ROWS. The last tiles have the most work and begin first.
extern "C" __global__ void __launch_bounds__(3 * GROUP_THREADS, 1)
    attend_prefill(ELEMENT* attended, const ELEMENT* q, const ELEMENT* q_rest, const void* map, const int2* tiles,
                   const int* positions, const int* tables, const int* table_starts, long long slot_stride,
                   long long layer_offset, int kv_heads, float scale_log2, int window) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ __align__(8) ull barriers[2 * SLOTS];
  const unsigned ring = ((unsigned)__cvta_generic_to_shared(shared) + 1023) / 1024 * 1024;
  const unsigned full = (unsigned)__cvta_generic_to_shared(barriers), empty = full + 8 * SLOTS;
  const int2 rows = tiles[gridDim.y - 1 - blockIdx.y];
  const int head = blockIdx.x, heads = gridDim.x, kv_head = head / (heads / kv_heads);
  const int start = positions[rows.x], last = start + rows.y - 1;
  const int begin = WINDOWED ? max(0, start + 1 - window) / TILE * TILE : 0;
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < SLOTS; slot++) init_barrier(full + 8 * slot, 1), init_barrier(empty + 8 * slot, 8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x < GROUP_THREADS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    const int part = layer_offset / ((long long)BLOCK_SIZE * kv_heads * HEAD_DIM);
    if (threadIdx.x < 32) copy_tiles(ring, full, empty, map, part, kv_head, tables + table_starts[rows.x], begin, last);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4, g = lane / 4, c = lane % 4;
  const int own = warp * 16 + g;  // and own + 8
  const unsigned queries = ring + SLOTS * TILE_BYTES + warp / 4 * 64 * 128;
#pragma unroll
  for (int n = 0; n < 8; n++) {
    const int chunk = threadIdx.x % 16, row = threadIdx.x % GROUP_THREADS / 16 + 8 * n;
    const long long from = (long long)rows.x + min(warp / 4 * 64 + row, rows.y - 1);
    const uint4 eight = *(const uint4*)(q + (from * heads + head) * HEAD_DIM + chunk * 8);
    const unsigned to = queries + chunk / 8 * PANEL_BYTES + row * 128 + ((chunk ^ row) & 7) * 16;
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(eight.x), "r"(eight.y), "r"(eight.z), "r"(eight.w)
                 : "memory");
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("bar.sync %0, %1;" ::"r"(2 + warp / 4), "n"(GROUP_THREADS) : "memory");
  unsigned weights[8][4];
  float scores[64], mixed[64] = {}, greatest[2] = {-INFINITY, -INFINITY}, totals[2] = {}, shrink[2];

  // Makes weights of the scores of a tile, in place.
  const auto weigh = [&](int first) {
    if (first + TILE - 1 > start + warp * 16) {  // some row of this warp may not see all of the tile
#pragma unroll
      for (int n = 0; n < 16; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (first + 8 * n + 2 * c + i % 2 > start + own + i / 2 * 8) scores[4 * n + i] = -INFINITY;
    }
    if (WINDOWED && first <= start + warp * 16 + 15 - window) {  // or may be beyond some of the tile
#pragma unroll
      for (int n = 0; n < 16; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (first + 8 * n + 2 * c + i % 2 <= start + own + i / 2 * 8 - window) scores[4 * n + i] = -INFINITY;
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float before = greatest[r];
#pragma unroll
      for (int n = 0; n < 16; n++)
        greatest[r] = fmaxf(greatest[r], fmaxf(scores[4 * n + 2 * r], scores[4 * n + 2 * r + 1]));
      greatest[r] = fmaxf(greatest[r], __shfl_xor_sync(EVERY_LANE, greatest[r], 1));
      greatest[r] = fmaxf(greatest[r], __shfl_xor_sync(EVERY_LANE, greatest[r], 2));
      // A row that has seen nothing yet has no greatest score; any finite level gives its scores the weight 0.
      const float top = WINDOWED && greatest[r] == -INFINITY ? 0 : greatest[r];
      shrink[r] = power_of_two((before - top) * scale_log2);
      const float level = top * scale_log2;
      totals[r] *= shrink[r];
#pragma unroll
      for (int n = 0; n < 16; n++)
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; i++)
          totals[r] += scores[4 * n + i] = power_of_two(scores[4 * n + i] * scale_log2 - level);
    }
  };
  const auto narrow_weights = [&] {
#pragma unroll
    for (int k = 0; k < 8; k++)
#pragma unroll
      for (int i = 0; i < 4; i++) weights[k][i] = paired(scores[8 * k + 2 * i], scores[8 * k + 2 * i + 1]);
  };
  const auto release = [&](int slot) {
    if (lane == 0) arrive(empty + 8 * slot);
  };

  Place at = {0, 0};
  wait_barrier(full, 0);
  hold(scores);
  fence_products();
  begin_scores(scores, queries, ring);
  commit_products();
  wait_products<0>();
  hold(scores);
  release(at.slot);
  at.advance();
  weigh(begin);
  narrow_weights();
  for (int first = begin + TILE; first <= last; first += TILE) {
    const int keys = at.slot;
    wait_barrier(full + 8 * keys, at.parity);
    at.advance();
    hold(scores);
    hold(mixed);
    fence_products();
    begin_scores(scores, queries, ring + keys * TILE_BYTES);
    commit_products();
    const int values = at.slot;
    wait_barrier(full + 8 * values, at.parity);
    at.advance();
    begin_mixing(mixed, weights, ring + values * TILE_BYTES);
    commit_products();
    wait_products<1>();
    hold(scores);
    weigh(first);
    // A sum of weights is never negative, but the assembler does not know that: otherwise it would move the computation
    // of the weights behind the wait for the values.
    release(keys + (totals[0] + totals[1] < 0));
    wait_products<0>();
    hold(mixed);
    release(values);
#pragma unroll
    for (int n = 0; n < 16; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) mixed[4 * n + i] *= shrink[i / 2];
    narrow_weights();
  }
  wait_barrier(full + 8 * at.slot, at.parity);
  // What lies behind the last position may not be finite, and has the weight 0.
  if ((last - begin) % TILE < TILE - 1) clear_rows(ring + at.slot * TILE_BYTES, (last - begin) % TILE + 1);
  hold(mixed);
  fence_products();
  begin_mixing(mixed, weights, ring + at.slot * TILE_BYTES);
  commit_products();
  wait_products<0>();
  hold(mixed);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float total = totals[r];
    total += __shfl_xor_sync(EVERY_LANE, total, 1);
    total += __shfl_xor_sync(EVERY_LANE, total, 2);
    if (own + 8 * r >= rows.y) continue;
    ELEMENT* to = attended + ((long long)(rows.x + own + 8 * r) * heads + head) * HEAD_DIM + 2 * c;
#pragma unroll
    for (int n = 0; n < 16; n++)
      *(unsigned*)(to + 8 * n) = paired(mixed[4 * n + 2 * r] / total, mixed[4 * n + 2 * r + 1] / total);
  }
}
