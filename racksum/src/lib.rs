//! racksum sums tensors for distributed training. An aggregator on an ordinary host near the rack
//! receives the non-zero blocks of each rank's tensor over UDP, sums them, and sends the sum to all
//! ranks. This crate is the client for Rust programs; `pip install racksum` installs the client for
//! PyTorch.
//!
//! Each process of a job is a rank. [`ConnectOptions`] joins a job, and [`Client::allreduce`] sums
//! a tensor in place:
//!
//! ```
//! use racksum::{ConnectOptions, Error};
//!
//! # use racksum_aggregator::{Aggregator, Config};
//! # let aggregator = Aggregator::start(Config { port: 0, pool_mib: 64, ..Config::default() })?;
//! # let address = aggregator.addr().to_string();
//! // `address` is the HOST:PORT of a `racksum aggregator`. These two ranks are threads; in
//! // training, each rank is a process of its own.
//! let train = |rank: u16| -> Result<Vec<f32>, Error> {
//!     let client = ConnectOptions::new(&address, "my-job").rank(rank).world(2).connect().unwrap();
//!     let mut gradient = vec![1.5; 1000];
//!     client.allreduce(&mut gradient)?;
//!     Ok(gradient)
//! };
//! std::thread::scope(|scope| {
//!     let ranks = [0, 1].map(|rank| scope.spawn(move || train(rank)));
//!     for rank in ranks {
//!         assert_eq!(rank.join().unwrap().unwrap(), [3.0; 1000]);
//!     }
//! });
//! # Ok::<(), racksum_aggregator::StartError>(())
//! ```
//!
//! # Several ops at once, and async code
//!
//! [`Client::submit`] starts an op and returns a [`Handle`]. [`Handle::wait`] blocks the calling
//! thread. A handle is also a future, which needs no particular runtime:
//!
//! ```
//! use racksum::{Client, Descriptor, Element, Error};
//!
//! async fn sum(client: &Client, layers: Vec<Vec<f32>>) -> Result<Vec<Vec<f32>>, Error> {
//!     let start = |layer: Vec<f32>| {
//!         let descriptor = Descriptor::sum(layer.len() as u64, f32::DTYPE);
//!         client.submit(layer, descriptor)
//!     };
//!     let handles = layers.into_iter().map(start).collect::<Result<Vec<_>, _>>()?;
//!     let mut sums = Vec::new();
//!     for handle in handles {
//!         sums.push(handle.await?.tensor);
//!     }
//!     Ok(sums)
//! }
//!
//! # use racksum::ConnectOptions;
//! # use racksum_aggregator::{Aggregator, Config};
//! # let aggregator = Aggregator::start(Config { port: 0, pool_mib: 64, ..Config::default() })?;
//! # let address = aggregator.addr().to_string();
//! # let runtime = tokio::runtime::Builder::new_current_thread().build()?;
//! # runtime.block_on(async {
//! let options = ConnectOptions::new(&address, "my-job").rank(0).world(1);
//! let client = options.connect_async().await.unwrap();
//! assert_eq!(sum(&client, vec![vec![1.0; 10], vec![2.0]]).await.unwrap()[1], [2.0]);
//! # });
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! All ranks must start the same ops in the same order. Ops may end in any order.
//!
//! # Sparse tensors
//!
//! The client never sends blocks that are zero. If a tensor exists only as a list of blocks, such
//! as the rows of an embedding, pass [`Blocks`] as the operand. The result then holds the sum of
//! every block that any rank passed.
//!
//! # Wire types and other reductions
//!
//! A [`Descriptor`] says how an op reduces: its [`Reduction`], its [`WireType`], the size of a
//! block and the lane. [`Client::reduce`] takes a descriptor and reduces a tensor in place.
//!
//! # Failures
//!
//! Every op ends within its timeout, with a result or an [`Error`] that names the cause. With
//! several sets of aggregators, as in `"a:7177,b:7177"`, a job moves to the next set when its
//! aggregator fails, and each op still produces the same bits. The examples `allreduce`,
//! `sparse_blocks` and `failover` run against aggregators in their own process.

mod options;

pub use half::{bf16, f16};
pub use options::ConnectOptions;
pub use racksum_proto::auth::{DataAuth, Key};
pub use racksum_proto::control::OnRankLoss;
pub use racksum_proto::descriptor::{Descriptor, DescriptorError};
pub use racksum_proto::dtype::{DType, Reduction, WireType};
pub use racksum_proto::error::{OpError, SubmitError};
pub use racksum_proto::ids::{Generation, OpId, Rank};
pub use racksum_worker::tensor::Element;
pub use racksum_worker::{
    Blocks, Client, ConnectError, Error, Grant, Handle, Operand, Reduced, Region, Stats,
};
