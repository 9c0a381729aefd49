// Attention over pages: what is asked (AttentionCall), and who does which part of it (AttentionPlan).
#pragma once

#include <cstdint>
#include <vector>

#include "team.h"

namespace paged {

enum Format : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, INT8 = 3, INT4 = 4 };

// The sequences of a step, one after another on one flat axis of tokens, as AttentionMetadata has them.
struct Sequences {
  const int32_t* query_start;  // [count + 1]
  const int32_t* lengths;      // [count] tokens of each, its queries are the last
  const int32_t* tables;       // [count, table_stride] page ids
  int64_t table_stride;
  int64_t count;
};

// K and V of one layer, [pages, page_size, kv_heads, head_dim].
struct Pages {
  void* k;
  void* v;
  Format format;
  int64_t page_size, kv_heads, head_dim;
};

struct AttentionCall {
  const float* q;    // [tokens, q_stride], of which heads * head_dim floats count
  float* out;        // [tokens, heads * head_dim]
  int64_t q_stride;
  Pages pages;
  int64_t heads;
  float scale;
  float soft_cap;  // scores are cap * tanh(score / cap); 0 is none
};

constexpr int64_t BLOCK = 256;  // tokens; K and V are cut at its multiples, and the parts are merged in order
constexpr int64_t PART = 64;    // of a block, turned over at a time
constexpr int64_t MANY = 16;    // a sequence with more queries than this is a chunk

// One query token: where its row is, and what it sees.
struct Query {
  int64_t token;     // on the flat axis
  int64_t position;  // in its sequence; it sees up to and including this
  int64_t partial;   // its first partial result, one for every block that it sees
};

// Work for one thread and one KV head: some queries against some blocks of one block table.
struct Unit {
  int64_t first, count;              // of AttentionPlan::queries
  int64_t first_block, last_block;   // both included
  const int32_t* table;
  bool whole;  // all blocks that these queries see: they end here. Else one block, the results of which are kept
};

// How the sequences of a step are cut into units: the same for every layer of a group. A chunk is cut by its queries,
// each unit going through all blocks; the others are cut by blocks as well, so that one long sequence keeps all threads
// busy, and sequences whose tables agree on a block share the unit that reads it.
struct AttentionPlan {
  std::vector<Query> queries;
  std::vector<Unit> units;
  std::vector<int64_t> split;  // queries whose partial results are to be merged, by index
  int64_t partials = 0;
  int64_t window = 0;  // tokens that a query sees, its own included; 0 is all

  void make(const Sequences& sequences, int64_t page_size, int64_t window, int64_t group, bool share);

  int64_t first_seen(int64_t position) const { return window && position >= window ? position - window + 1 : 0; }
};

// Floats that attention needs besides the plan: partial results, and room for each thread.
struct AttentionRoom {
  std::vector<float> partials;
  std::vector<std::vector<float>> threads;

  void fit(const AttentionPlan& plan, const AttentionCall& call, int threads);
};

int64_t queries_at_once(int64_t group);  // of one unit
inline int64_t padded_dim(int64_t head_dim) { return (head_dim + 31) / 32 * 32; }  // whole vectors, of pairs too

}  // namespace paged
