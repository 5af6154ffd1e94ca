use std::net::{SocketAddr, UdpSocket};
use std::sync::Mutex;

use racksum_proto::auth::Key;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::DType;
use racksum_proto::ids::{Generation, JobId, OpId, Rank, WindowId};
use racksum_proto::wire::{Flags, Header, Kind};
use tokio::sync::mpsc::channel;

use super::*;
use crate::config::Fanout;
use crate::registry::MEMBER_QUEUE;
use crate::registry::tests::{join, registry, wish};

/// A job of two ranks that may move to a standby. Rank 1 has left, and rank 0 has not acknowledged
/// a result.
struct Unsettled {
    registry: SharedRegistry,
    /// The request with which rank 1 rejoins.
    back: Join,
    /// The seat of rank 0.
    stays: Seat,
    /// Rank 0's data socket, and the shard address that it sends to.
    socket: UdpSocket,
    shard: SocketAddr,
    id: JobId,
}

impl Unsettled {
    fn new() -> Self {
        let mut registry = registry(Fanout::Unicast, 0);
        let shard = registry.shards()[0].addr;
        let sockets = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
        let wishes = [0, 1].map(|rank: u16| {
            let port = sockets[usize::from(rank)].local_addr().unwrap().port();
            let secret = Some(Key([7; Key::LEN]));
            let ours = Join { secret, may_move: true, multicast: false, ..wish("job", rank, 2) };
            Join { data_ports: vec![port], ..ours }
        });
        let joined = wishes.clone().map(|wish| join(&mut registry, wish).unwrap());
        let [(stays, ..), (seat, joined, _)] = &joined;
        assert_eq!(*joined, Joined::Ready);
        let id = seat.id();
        for (rank, socket) in (0..).map(Rank).zip(&sockets) {
            socket.send_to(&contribution(id, rank), shard).unwrap();
        }
        for socket in &sockets {
            socket.recv(&mut [0; 2048]).expect("the sum arrives");
        }
        registry.part(seat, Some(OpId(1)), Instant::now());
        let [socket, of_left] = sockets;
        of_left.send_to(&ack(id, Rank(1)), shard).unwrap();
        let [_, back] = wishes;
        let back = Join { rejoin: true, ..back };
        let stays = stays.clone();
        Self { registry: Arc::new(Mutex::new(registry)), back, stays, socket, shard, id }
    }

    async fn rejoin(&self, caller: &Caller, limit: Duration) -> Result<(), String> {
        let back = rejoin(&self.registry, &self.back, caller, limit).await;
        back.map(drop).map_err(Refusal::why)
    }

    /// Acknowledges the result as rank 0.
    fn settle(&self) {
        self.socket.send_to(&ack(self.id, Rank(0)), self.shard).unwrap();
    }
}

fn header(job: JobId, sender: Rank, kind: Kind) -> Header {
    let window = WindowId::new(OpId(0), 0);
    Header {
        kind,
        job,
        generation: Generation(0),
        sender,
        lane: 0,
        shard: 0,
        window,
        ack: window,
        mask: 0,
        previous: 0,
        length: 0,
        fragment: 0,
        flags: Flags::NONE,
    }
}

fn datagram(header: Header, body: &[u8]) -> Vec<u8> {
    let mut bytes = [0; Header::LEN];
    Header { length: u16::try_from(body.len()).unwrap(), ..header }.encode(&mut bytes);
    [&bytes[..], body].concat()
}

/// Builds a datagram in which a rank opens an op of one element and contributes to it.
fn contribution(job: JobId, rank: Rank) -> Vec<u8> {
    let mut descriptor = [0; Descriptor::LEN];
    Descriptor::sum(1, DType::F32).encode(&mut descriptor);
    let rest = [&u32::MAX.to_be_bytes()[..], &1u32.to_be_bytes(), &1u64.to_be_bytes()].concat();
    let open = datagram(header(job, rank, Kind::Open), &[&descriptor[..], &rest].concat());
    let data = Header { mask: 1, ..header(job, rank, Kind::Data) };
    [open, datagram(data, &1f32.to_le_bytes())].concat()
}

/// Builds a rank's acknowledgement of all results of the first op.
fn ack(job: JobId, rank: Rank) -> Vec<u8> {
    let ack = WindowId::new(OpId(1), 0);
    datagram(Header { ack, ..header(job, rank, Kind::Ack) }, &[])
}

/// Returns a caller at an address.
fn caller(ip: [u8; 4]) -> Caller {
    let (outbox, _) = channel(MEMBER_QUEUE);
    Caller { identity: None, addr: (ip, 9).into(), outbox }
}

const OWN: [u8; 4] = [127, 0, 0, 1];
const LONG: Duration = Duration::from_secs(300);

#[tokio::test]
async fn a_rank_that_is_started_again_goes_before_its_own_earlier_attempt() {
    let job = Unsettled::new();
    let (own, again) = (caller(OWN), caller(OWN));
    let (first, second) = tokio::join!(biased; job.rejoin(&own, LONG), async {
        let second = job.rejoin(&again, LONG);
        let settled = async {
            // Both callers have begun to rejoin.
            tokio::task::yield_now().await;
            job.settle();
        };
        tokio::join!(second, settled).0
    });
    let why =
        "another process is rejoining job \"job\" as rank 1; start only one process for the rank";
    assert_eq!((first, second), (Err(why.into()), Ok(())));
}

#[tokio::test]
async fn a_rank_whose_job_ends_while_it_comes_back_is_told_that_it_runs_no_more() {
    let job = Unsettled::new();
    let own = caller(OWN);
    let (back, ()) = tokio::join!(biased; job.rejoin(&own, LONG), async {
        lock(&job.registry).part(&job.stays, None, Instant::now());
    });
    let why = back.unwrap_err();
    assert!(why.contains("job \"job\" is not running here"), "{why}");
}

#[tokio::test]
async fn nobody_else_goes_before_a_rank_that_comes_back() {
    let job = Unsettled::new();
    let (own, others) = (caller(OWN), [[127, 0, 0, 8], [127, 0, 0, 9]].map(caller));
    let back = |caller| job.rejoin(caller, LONG);
    let (first, second, own, third, ()) =
        tokio::join!(back(&others[0]), back(&others[1]), back(&own), back(&others[1]), async {
            // All callers have begun to rejoin.
            tokio::task::yield_now().await;
            job.settle();
        },);
    let is_coming = |ip| {
        Err(format!(
            "{ip} is already rejoining job \"job\" as rank 1; start only one process for the rank"
        ))
    };
    assert_eq!([second, third], ["127.0.0.8", "127.0.0.1"].map(is_coming));
    assert!(first.is_err(), "{first:?}");
    assert_eq!(own, Ok(()));
}

#[tokio::test]
async fn a_rank_that_cannot_come_back_is_told_so_in_time_and_leaves_its_place_to_the_next() {
    let job = Unsettled::new();
    let own = caller(OWN);
    let why = job.rejoin(&own, Duration::from_millis(50)).await.unwrap_err();
    assert!(why.contains("a rank of job \"job\" has not acknowledged a result for 0 s"), "{why}");
    job.settle();
    assert_eq!(job.rejoin(&own, LONG).await, Ok(()));
}

#[tokio::test]
async fn a_job_is_asked_after_once_however_many_wait_for_it() {
    let job = Unsettled::new();
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let watched: Vec<_> = (0..64).filter_map(|_| watch(&job.registry, job.id)).collect();
    assert_eq!((watched.len(), tasks()), (64, 1));
    // The last watcher gets only reports that were requested after it subscribed.
    job.settle();
    let mut last = watched.into_iter().last().unwrap();
    while !last.next().await.unwrap().settled {}
    drop(last);
    while tasks() > 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(
        watch(&job.registry, job.id).is_some() && tasks() == 1,
        "a new watcher starts the task again"
    );
    assert!(watch(&job.registry, JobId(0)).is_none());
}
