#include <algorithm>
#include <unordered_map>

#include "attention.h"

namespace paged {

int64_t queries_at_once(int64_t group) { return std::max<int64_t>(1, 48 / group); }

void AttentionPlan::make(const Sequences& seqs, int64_t page_size, int64_t the_window, int64_t group, bool share) {
  queries.clear();
  units.clear();
  split.clear();
  partials = 0;
  window = the_window;
  share = share && BLOCK % page_size == 0;
  const int64_t at_once = queries_at_once(group), pages_per_block = BLOCK / page_size;
  std::vector<Unit> shared;  // full blocks of sequences that are no chunks; queries are filled in below
  std::vector<std::vector<int64_t>> members;
  std::unordered_map<int64_t, std::vector<int64_t>> by_page;  // the block's first page -> those of `shared`

  for (int64_t s = 0; s < seqs.count; s++) {
    const int64_t begin = seqs.query_start[s], count = seqs.query_start[s + 1] - begin;
    const int64_t before = seqs.lengths[s] - count;
    const int32_t* table = seqs.tables + s * seqs.table_stride;
    const int64_t first = (int64_t)queries.size();
    for (int64_t i = 0; i < count; i++) queries.push_back({begin + i, before + i, 0});
    for (int64_t i = 0; i < count; i += at_once) {
      const int64_t some = std::min(at_once, count - i);
      const int64_t low = first_seen(before + i) / BLOCK, high = (before + i + some - 1) / BLOCK;
      if (count > MANY || low == high) {
        units.push_back({first + i, some, low, high, table, true});
        continue;
      }
      for (int64_t q = first + i; q < first + i + some; q++) {
        queries[q].partial = partials;
        partials += queries[q].position / BLOCK - first_seen(queries[q].position) / BLOCK + 1;
        split.push_back(q);
      }
      for (int64_t block = low; block <= high; block++) {
        const int32_t* pages = table + block * pages_per_block;
        const bool full = (block + 1) * BLOCK <= before + i + 1 && first_seen(before + i) <= block * BLOCK;
        if (!share || !full) {
          units.push_back({first + i, some, block, block, table, false});
          continue;
        }
        // Sequences with the same pages there are read together.
        std::vector<int64_t>& candidates = by_page[((int64_t)block << 32) | (uint32_t)pages[0]];
        int64_t found = -1;
        for (int64_t candidate : candidates)
          if (std::equal(pages, pages + pages_per_block, shared[candidate].table + block * pages_per_block))
            found = candidate;
        if (found < 0) {
          found = (int64_t)shared.size();
          candidates.push_back(found);
          shared.push_back({0, 0, block, block, table, false});
          members.emplace_back();
        }
        for (int64_t q = first + i; q < first + i + some; q++) members[found].push_back(q);
      }
    }
  }
  for (size_t i = 0; i < shared.size(); i++) {
    const int64_t count = (int64_t)members[i].size();
    for (int64_t from = 0; from < count; from += at_once) {
      const int64_t some = std::min(at_once, count - from);
      Unit unit = shared[i];
      unit.first = members[i][from];
      unit.count = some;
      if (members[i][from + some - 1] != members[i][from] + some - 1) {  // not side by side: list them again
        unit.first = (int64_t)queries.size();
        for (int64_t m = from; m < from + some; m++) {
          const Query copy = queries[members[i][m]];
          queries.push_back(copy);
        }
      }
      units.push_back(unit);
    }
  }
  // The longest first, so that no thread begins a long one when the others are done.
  const auto cost = [](const Unit& u) { return u.count * (u.last_block - u.first_block + 1); };
  std::stable_sort(units.begin(), units.end(), [&](const Unit& a, const Unit& b) { return cost(a) > cost(b); });
}

void AttentionRoom::fit(const AttentionPlan& plan, const AttentionCall& call, int count) {
  const int64_t group = call.heads / call.pages.kv_heads;
  const int64_t rows = queries_at_once(group) * group, dim = padded_dim(call.pages.head_dim);
  // of a thread: queries, state and block result of `dim` floats and two more a row, scores, a part of K or V
  const int64_t floats = rows * (3 * dim + 4 + BLOCK) + PART * dim + 16;
  const auto grow = [](std::vector<float>& v, int64_t n) {
    if ((int64_t)v.size() < n) v.resize(n);
  };
  grow(partials, plan.partials * call.heads * (dim + 2));
  if ((int)threads.size() < count) threads.resize(count);
  for (auto& one : threads) grow(one, floats);
}

}  // namespace paged
