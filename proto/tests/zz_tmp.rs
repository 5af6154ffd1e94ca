use racksum_proto::aggregator::{self, Aggregation};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::DType;
use racksum_proto::geometry::Fragmentation;
use racksum_proto::ids::*;
use racksum_proto::time::*;
use racksum_proto::wire::*;

#[test]
fn big_disagreement() {
    let mut a = Aggregation::new(aggregator::Config { job: JobId(7), generation: Generation(3), world: 2, lanes: 1, shard: 0, shards: 1, pool_slots: 8, max_ops: 4, cut: Fragmentation::new(1408).unwrap(), results_in_flight: 1<<20 }, Time(0));
    for (rank, elements) in [(0u16, 300_000_000_000u64 >> 3), (1, 1000)] {
        let d = Descriptor::sum(elements, DType::F32);
        let mut body = [0; 1200];
        let (len, _) = OpenEncoder::new().encode(&d, None, core::iter::once(true), &mut body);
        let h = Header { kind: Kind::Open, sender: Rank(rank), length: len as u16, ..Header::probe(JobId(7), Generation(3), 0) };
        let mut out = [0; 48]; h.encode(&mut out);
        let dg = [&out[..], &body[..len]].concat();
        println!("{:?}", a.handle_datagram(Time(0), &dg, false, &mut ()));
    }
    println!("{:?}", a.poll_fold());
}
