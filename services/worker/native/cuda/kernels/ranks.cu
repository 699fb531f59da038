// What the ranks of a tensor-parallel group exchange within a step, through memory that each maps of every other.
//
//   memory of each rank    | room 0: a place for each sender | room 1: … | room 2: … |
//   call k                 push own words into place [k mod 3][own rank] of every peer ─▶ empty the room of call k - 1
//                          ─▶ await every peer's words in the own room k mod 3 ─▶ use them
//
// The words are their own flags: a word with all bits set is not there yet. (Such a word in the data, a NaN, is sent as
// another NaN.) So nothing depends on the order in which stores arrive, and no flag is a trip of its own.
//
// Three rooms are enough. A rank pushes for call k + 2 when it has ended call k + 1, so each peer has begun call k + 1, and
// has ended call k, in which it emptied the room of call k - 1, the same as that of call k + 2. Every call moves words
// between all ranks, in both directions; otherwise that would not hold.
//
// All thread blocks of a launch are there at once: there are no more than multiprocessors. A wait has a limit, after which
// the call and all later ones return without a result, and the host finds the number of the rank that was not heard.
#define MOST_RANKS 8
#define ROOMS 3
#define EMPTY 0xffffffffu
#define OTHER_NAN 0x7fffffffu
#define LOOKS 1024  // looks between two of the clock and of the host's word

// Words that are stored and loaded together: 4 if the widths of rows allow it, otherwise 1.
struct alignas(4 * WIDE) Words {
  unsigned of[WIDE];
};

struct Group {
  unsigned* rooms[MOST_RANKS];  // each rank's memory, as this rank maps it
  long long place_words;        // the words of one sender's place in a room
  int rank, ranks;
};

// The state of a rank, in its own device memory, between two calls.
struct State {
  unsigned long long call;      // the number of the next call
  unsigned long long limit_ns;  // of a wait
  unsigned long long used;      // the words of each place that the last call used
  unsigned long long ended;     // thread blocks of this call that have ended
  unsigned long long unheard;   // 1 + a rank that this call has given up; 0 if none
  unsigned long long lost;      // the same of all calls that have ended
};

// Two words of pinned host memory.
struct Host {
  int gone;  // 1 + a rank whose process has ended, written by the host
  int lost;  // State::lost for the host
};

__device__ __forceinline__ void store(unsigned* to, const Words& words) {
  if constexpr (WIDE == 4) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(words.of[0]), "r"(words.of[WIDE / 4]),
                 "r"(words.of[WIDE / 2]), "r"(words.of[WIDE - 1])
                 : "memory");
  } else {
    asm volatile("st.volatile.global.u32 [%0], %1;" ::"l"(to), "r"(words.of[0]) : "memory");
  }
}

__device__ __forceinline__ Words look(const unsigned* at) {
  Words words;
  if constexpr (WIDE == 4) {
    asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words.of[0]), "=r"(words.of[WIDE / 4]), "=r"(words.of[WIDE / 2]), "=r"(words.of[WIDE - 1])
                 : "l"(at)
                 : "memory");
  } else {
    asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(words.of[0]) : "l"(at) : "memory");
  }
  return words;
}

// Returns words without an EMPTY one among them.
__device__ __forceinline__ Words told(Words words) {
#pragma unroll
  for (int i = 0; i < WIDE; i++)
    if (words.of[i] == EMPTY) words.of[i] = OTHER_NAN;
  return words;
}

__device__ __forceinline__ unsigned long long now_ns() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// One launch, as a thread sees it.
struct Call {
  const Group& group;
  State* state;
  Host* host;
  unsigned room, last_room;

  __device__ Call(const Group& group, State* state, Host* host) : group(group), state(state), host(host) {
    const unsigned long long call = state->call;
    room = call % ROOMS, last_room = (call + ROOMS - 1) % ROOMS;
  }

  // Whether a call before this one has lost a rank. It is the same for all threads: only ended calls count.
  __device__ bool is_over() const { return state->lost != 0; }

  __device__ unsigned* place(int of_rank, unsigned room, int sender) const {
    return group.rooms[of_rank] + ((long long)room * group.ranks + sender) * group.place_words;
  }

  __device__ void push(long long at, const Words& words) const {
    for (int step = 1; step < group.ranks; step++) {  // not all into the same one at once
      const int peer = (group.rank + step) % group.ranks;
      store(place(peer, room, group.rank) + at, words);
    }
  }

  // Empties the part of this thread of what the last call used.
  __device__ void empty(long long first, long long step) const {
    Words none;
#pragma unroll
    for (int i = 0; i < WIDE; i++) none.of[i] = EMPTY;
    const long long used = state->used;
    for (int sender = 0; sender < group.ranks; sender++) {
      if (sender == group.rank) continue;
      unsigned* to = place(group.rank, last_room, sender);
      for (long long at = first; at < used; at += step) store(to + at, none);
    }
  }

  // Returns a sender's words; whatever is there if they do not come in time.
  __device__ Words await(int sender, long long at) const {
    const unsigned* from = place(group.rank, room, sender) + at;
    unsigned long long begun_ns = 0;
    for (unsigned looks = 1;; looks++) {
      const Words words = look(from);
      bool there = true;
#pragma unroll
      for (int i = 0; i < WIDE; i++) there = there && words.of[i] != EMPTY;
      if (there) return words;
      if (looks % LOOKS) continue;
      const unsigned long long now = now_ns();
      if (!begun_ns) begun_ns = now;
      const int gone = *(volatile int*)&host->gone;
      const bool given_up = *(volatile unsigned long long*)&state->unheard != 0;  // by another thread
      if (gone == 0 && !given_up && now - begun_ns < *(volatile unsigned long long*)&state->limit_ns) continue;
      atomicCAS(&state->unheard, 0ull, (unsigned long long)(gone ? gone : sender + 1));
      return words;
    }
  }

  // Ends this thread block; the last one prepares the next call.
  __device__ void end(long long used) const {
    __syncthreads();
    if (threadIdx.x) return;
    __threadfence();
    if (atomicAdd(&state->ended, 1ull) + 1 < gridDim.x) return;
    __threadfence();
    const unsigned long long unheard = *(volatile unsigned long long*)&state->unheard;
    if (unheard) {
      *(volatile int*)&host->lost = (int)unheard;
      __threadfence_system();
    }
    state->lost = unheard;
    state->ended = 0;
    state->used = used;
    state->call += 1;
  }
};

// to (count) float32 = the sum of all ranks' parts (count) float32; with `add`, `factor` times the sum is added to `to`.
// Each rank adds in the order of ranks, so that all have the same sums, bit for bit.
extern "C" __global__ void __launch_bounds__(THREADS)
    sum_parts(const __grid_constant__ Group group, State* state, Host* host, float* to, const float* part,
              long long count, int add, float factor) {
  const Call call(group, state, host);
  if (call.is_over()) return;
  const long long first = ((long long)blockIdx.x * THREADS + threadIdx.x) * WIDE, step = (long long)gridDim.x * THREADS * WIDE;
  for (long long at = first; at < count; at += step) call.push(at, told(*(const Words*)(part + at)));
  call.empty(first, step);
  for (long long at = first; at < count; at += step) {
    float sums[WIDE];
#pragma unroll
    for (int i = 0; i < WIDE; i++) sums[i] = 0;
    for (int sender = 0; sender < group.ranks; sender++) {
      const Words words = sender == group.rank ? told(*(const Words*)(part + at)) : call.await(sender, at);
#pragma unroll
      for (int i = 0; i < WIDE; i++) sums[i] += __uint_as_float(words.of[i]);
    }
#pragma unroll
    for (int i = 0; i < WIDE; i++) to[at + i] = add ? to[at + i] + factor * sums[i] : sums[i];
  }
  call.end(count);
}

struct Columns {
  int begin[MOST_RANKS + 1];  // where each rank's columns begin; then the number of all
};

// rows (count, width) float32: each rank has its own columns of each row, and gets those of all others. All ranks get
// them, though only the first needs them: see above.
extern "C" __global__ void __launch_bounds__(THREADS)
    join_columns(const __grid_constant__ Group group, State* state, Host* host, float* rows, int count,
                 const __grid_constant__ Columns columns, int widest) {
  const Call call(group, state, host);
  if (call.is_over()) return;
  const int width = columns.begin[group.ranks];
  const long long first = ((long long)blockIdx.x * THREADS + threadIdx.x) * WIDE, step = (long long)gridDim.x * THREADS * WIDE;
  const int own = columns.begin[group.rank], own_width = columns.begin[group.rank + 1] - own;
  for (long long at = first; at < (long long)count * own_width; at += step)
    call.push(at, told(*(const Words*)(rows + at / own_width * width + own + at % own_width)));
  call.empty(first, step);
  for (int sender = 0; sender < group.ranks; sender++) {
    if (sender == group.rank) continue;
    const int begin = columns.begin[sender], its_width = columns.begin[sender + 1] - begin;
    for (long long at = first; at < (long long)count * its_width; at += step)
      *(Words*)(rows + at / its_width * width + begin + at % its_width) = call.await(sender, at);
  }
  call.end((long long)count * widest);
}
