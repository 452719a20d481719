// Which weights dropout leaves: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). The key
// is the seed; 16 counters, of a panel's place, the row and the head, give 64 numbers, number 16 j + n the j-th of counter
// n. So what is drawn for a weight follows from the seed and its place alone, in the forward and in the backward.
struct Dropout {
  u32 key[2], least;  // a weight whose number is less is dropped
  float factor;       // of those that are left
};
inline Dropout dropout_of(const Args& a) {
  if (!a.seed) return {{0, 0}, 0, 1.0f};
  const u64 seed = u64(*a.seed);
  const double least = std::min(std::nearbyint(a.dropout * 4294967296.0), 4294967295.0);
  return {{u32(seed), u32(seed >> 32)}, u32(least), a.dropout < 1 ? float(1.0 / (1.0 - a.dropout)) : 0.0f};
}

// The keys of a panel whose weights are left, a bit each, for a row of a head counted over the batch.
ATTN_ONCE u64 left_word(const Dropout& d, u64 head, i64 row, i64 key) {
  using lanes = Isa::lanes;
  constexpr int EACH = 2;  // vectors side by side, since each round waits for the one before it
  const lanes times[2] = {Isa::each(0xd2511f53), Isa::each(0xcd9e8d57)};
  u64 word = 0;
  for (int n = 0; n < 16; n += EACH * Isa::LANES) {
    lanes c[4][EACH];
    for (int x = 0; x < EACH; ++x) {
      c[0][x] = Isa::counted(u32(key / 4) + n + x * Isa::LANES);
      c[1][x] = Isa::each(u32(row)), c[2][x] = Isa::each(u32(head)), c[3][x] = Isa::each(u32(head >> 32));
    }
    u32 key0 = d.key[0], key1 = d.key[1];
    for (int round = 0; round < 10; ++round, key0 += 0x9e3779b9, key1 += 0xbb67ae85)
      for (int x = 0; x < EACH; ++x) {
        const lanes a = Isa::product(c[0][x], times[0]), b = Isa::product(c[2][x], times[1]);
        c[0][x] = Isa::differing(Isa::upper(b), c[1][x], Isa::each(key0));
        c[2][x] = Isa::differing(Isa::upper(a), c[3][x], Isa::each(key1));
        c[1][x] = b, c[3][x] = a;
      }
    for (int j = 0; j < 4; ++j)
      for (int x = 0; x < EACH; ++x) word |= u64(Isa::at_least(c[j][x], d.least)) << (16 * j + n + x * Isa::LANES);
  }
  return word;
}
