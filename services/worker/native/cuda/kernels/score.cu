// Rates tokens: the natural logarithms of the probabilities that rows of logits (…, vocab) float32 give to tokens.
#include "sampling.cuh"

// Writes for each row of `rows` the log-probability of its token, and of the `counts` likeliest tokens, ties by lower id.
// `top_ids` and `top_logprobs` are (rows, most). A row with a logit that is not finite gets NaN; so does one without a
// token (-1).
extern "C" __global__ void __launch_bounds__(THREADS)
    score(float* logprobs, int* top_ids, float* top_logprobs, const float* logits, const int* tokens, const int* rows,
          const int* counts, int most, int vocab) {
  const int count = counts[blockIdx.x], number = rows[blockIdx.x], token = tokens[number];
  const float* row = logits + (long long)number * vocab;
  float value = -INFINITY;
  int id = vocab, broken = token < 0;
  each(row, vocab, [&](int at, float logit) {
    broken |= !isfinite(logit);
    if (logit > value) value = logit, id = at;
  });
  if (__syncthreads_or(broken)) {
    if (threadIdx.x == 0) logprobs[blockIdx.x] = __int_as_float(0x7FC00000);
    return;
  }
  Top top = block_top(value, id);
  const float greatest = top.value;
  double mass = 0;
  each(row, vocab, [&](int, float logit) { mass += expf(logit - greatest); });
  const double normaliser = greatest + log(block_sum(mass));
  if (threadIdx.x == 0) logprobs[blockIdx.x] = (float)(row[token] - normaliser);
  for (int n = 0; n < count; n++) {
    if (n > 0) {
      const Top last = top;
      value = -INFINITY, id = vocab;
      each(row, vocab, [&](int at, float logit) {
        const bool behind = logit < last.value || (logit == last.value && at > last.id);
        if (behind && logit > value) value = logit, id = at;
      });
      top = block_top(value, id);
    }
    if (threadIdx.x == 0) {
      top_ids[blockIdx.x * most + n] = top.id;
      top_logprobs[blockIdx.x * most + n] = (float)(top.value - normaliser);
    }
  }
}
