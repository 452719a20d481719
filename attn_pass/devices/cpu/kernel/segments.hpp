// Packed rows: each segment is an attention of its own, and so is each KV head of it.
struct Segment {
  i64 number, first, rows, head, kv_head;  // its first row of all rows, how many it has, its first heads
};
inline Segment segment_at(const Args& a, i64 task) {
  const i64 n = task / a.HK, hk = task % a.HK, first = a.offsets.at(n, 0);
  return {n, first, a.offsets.at(n + 1, 0) - first, hk * (a.H / a.HK), hk};
}

template <class P> void moved(P*& data, i64 bytes) {
  if (data) data = reinterpret_cast<P*>(reinterpret_cast<uintptr_t>(data) + bytes);
}

template <class T> Args segment_of(const Args& whole, const Segment& s, int threads) {
  Args a = whole;
  const i64 size = sizeof(typename T::st), of_bias = a.bias_type == FLOAT32 ? 4 : 2;
  moved(a.q.data, (s.first * a.q.stride[2] + s.head * a.q.stride[1]) * size);
  moved(a.k.data, (s.first * a.k.stride[2] + s.kv_head * a.k.stride[1]) * size);
  moved(a.v.data, (s.first * a.v.stride[2] + s.kv_head * a.v.stride[1]) * size);
  // Of all rows' keys in their order, or, where it differs from row to row, of a row's keys by their positions.
  moved(a.keep.data, s.first * a.keep.stride[a.keep.stride[2] ? 2 : 3] + s.head * a.keep.stride[1]);
  moved(a.bias.data, (s.number * a.bias.stride[0] + s.head * a.bias.stride[1]) * of_bias);
  moved(a.sink.data, s.head * a.sink.stride[1] * 4);
  for (Operand& x : a.captured) moved(x.data, (s.number * x.stride[0] + s.head * x.stride[1]) * 4);
  for (Lookup& x : a.lookups) {
    moved(x.data, (s.number * x.stride[0] + s.head * x.stride[1]) * (x.type == FLOAT32 ? 4 : 2));
    moved(x.place.data, (s.number * x.place.stride[0] + s.head * x.place.stride[1]) * 4);
  }
  for (PerBatch* x : {&a.shift, &a.starts, &a.ends}) moved(x->data, s.number * x->stride * 8);
  for (void** x : {&a.out, &a.rest}) moved(*x, (s.first * a.out_stride[2] + s.head * a.out_stride[1]) * size);
  moved(a.lse, (s.head * a.rows + s.first) * 4);
  moved(a.statistics, (s.head * a.rows + s.first) * 8);
  a.offsets = {nullptr, 0};
  a.first_head = s.number * whole.H + s.head;
  a.B = a.HK = 1, a.H = whole.H / whole.HK, a.L = a.S = s.rows, a.threads = threads;
  return a;
}
