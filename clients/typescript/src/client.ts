// The client of one encoder service.
import { create } from "@bufbuild/protobuf";
import type { MessageInitShape } from "@bufbuild/protobuf";
import * as grpc from "@grpc/grpc-js";
import { createXXHash3 } from "hash-wasm";
import { ChecksumAlgorithm, ChunkState } from "../generated/epd/encoder/v1/embedding_pb.js";
import type { EmbeddingChunk, EncoderRef, LeaseGrant } from "../generated/epd/encoder/v1/embedding_pb.js";
import {
  EncodeRequestSchema,
  EncoderService,
  FetchRequestSchema,
  GetServerInfoRequestSchema,
  LeaseState,
  ReadOutcome,
  ReleaseRequestSchema,
} from "../generated/epd/encoder/v1/encoder_service_pb.js";
import type { Event, GetServerInfoResponse } from "../generated/epd/encoder/v1/encoder_service_pb.js";
import { CHANNEL_OPTIONS, stream, unary } from "./calls.js";
import { Embedding } from "./embedding.js";
import { ReadError } from "./errors.js";

export interface ClientOptions {
  /** TLS; plain text by default. */
  credentials?: grpc.ChannelCredentials;
  /** The name under which leases are granted to this process. Empty: the caller of `encode`. */
  receiver?: string;
  /** Milliseconds that a read, a release, or a question may take; 30,000 by default. */
  timeoutMs?: number;
}

/** Encodes media, and reads the embeddings in band. */
export class EncoderClient {
  readonly #target: string;
  readonly #credentials: grpc.ChannelCredentials;
  readonly #receiver: string;
  readonly #timeoutMs: number;
  readonly #channels = new Map<string, grpc.Client>();
  #instanceId = "";

  /** @param target the gRPC target of the encoder, such as `127.0.0.1:50051`. */
  constructor(target: string, options: ClientOptions = {}) {
    this.#target = target;
    this.#credentials = options.credentials ?? grpc.credentials.createInsecure();
    this.#receiver = options.receiver ?? "";
    this.#timeoutMs = options.timeoutMs ?? 30_000;
  }

  /**
   * Encodes some or all media items of one prompt, and tells what happens: `accepted`, for each part at most one LAYOUT
   * and exactly one end (READY, `partFailed`, `partCancelled`), then `complete`. Leaving the loop cancels what is not
   * READY. Throws `EncoderError` if the request is refused as a whole.
   *
   * @param request what is not set is as the contract says.
   * @param deadline in milliseconds from now.
   */
  async *encode(
    request: MessageInitShape<typeof EncodeRequestSchema>,
    deadline?: number,
  ): AsyncGenerator<Event, void, undefined> {
    const message = create(EncodeRequestSchema, request);
    const options = deadline === undefined ? {} : { deadline: Date.now() + deadline };
    for await (const response of stream(this.#channel(this.#target), EncoderService.method.encode, message, options)) {
      for (const event of response.events) {
        if (event.event.case === "accepted") this.#instanceId = event.event.value.encoder?.instanceId ?? "";
        yield event;
      }
    }
  }

  /**
   * Reads a READY chunk, also one that another process received: fetches the bytes, checks number and checksum, gives
   * the lease back. Throws `ReadError` if the bytes could not be had, were damaged, or the lease had ended.
   */
  async read(chunk: EmbeddingChunk): Promise<Embedding> {
    const lease = this.#leaseOf(chunk);
    let outcome = ReadOutcome.TRANSPORT_FAILED;
    try {
      const bytes = await this.#fetch(chunk, lease);
      outcome = ReadOutcome.CORRUPT;
      await check(chunk, bytes);
      outcome = ReadOutcome.OK;
      const state = await this.#release(chunk, lease, outcome);
      if (state !== LeaseState.HELD && state !== LeaseState.ALREADY_RELEASED) {
        throw new ReadError(`the lease of part ${chunk.partIdx} ended before the read did: ${LeaseState[state]}`);
      }
      return new Embedding(chunk, bytes);
    } catch (error) {
      if (outcome !== ReadOutcome.OK) await this.#release(chunk, lease, outcome).catch(() => undefined);
      throw error;
    }
  }

  /** Gives back the leases of READY chunks that nobody will read. What cannot be given back runs out by itself. */
  async abandon(chunks: readonly EmbeddingChunk[]): Promise<void> {
    const releases = chunks.map(async (chunk) =>
      this.#release(chunk, this.#leaseOf(chunk), ReadOutcome.ABANDONED).catch(() => undefined),
    );
    await Promise.all(releases);
  }

  /** What the encoder is, can do, and is doing. Throws `EncoderError`. */
  serverInfo(): Promise<GetServerInfoResponse> {
    const request = create(GetServerInfoRequestSchema);
    return unary(this.#channel(this.#target), EncoderService.method.getServerInfo, request, this.#callOptions());
  }

  /** Ends all connections. */
  close(): void {
    for (const channel of this.#channels.values()) channel.close();
    this.#channels.clear();
  }

  async #fetch(chunk: EmbeddingChunk, lease: LeaseGrant): Promise<Uint8Array> {
    const bytes = new Uint8Array(Number(chunk.nbytes));
    let position = 0;
    const request = create(FetchRequestSchema, { leaseId: lease.leaseId });
    const channel = this.#channelOf(chunk.encoder);
    for await (const piece of stream(channel, EncoderService.method.fetch, request, this.#callOptions())) {
      if (position + piece.data.length > bytes.length) {
        throw new ReadError(`more than ${bytes.length} bytes came of part ${chunk.partIdx}`);
      }
      bytes.set(piece.data, position);
      position += piece.data.length;
    }
    if (position !== bytes.length) {
      throw new ReadError(`${position} of ${bytes.length} bytes came of part ${chunk.partIdx}`);
    }
    return bytes;
  }

  async #release(chunk: EmbeddingChunk, lease: LeaseGrant, outcome: ReadOutcome): Promise<LeaseState> {
    const request = create(ReleaseRequestSchema, { leases: [{ leaseId: lease.leaseId, outcome }] });
    const channel = this.#channelOf(chunk.encoder);
    const answer = await unary(channel, EncoderService.method.release, request, this.#callOptions());
    return answer.leases[0]?.state ?? LeaseState.UNSPECIFIED;
  }

  #leaseOf(chunk: EmbeddingChunk): LeaseGrant {
    const lease = chunk.leases.find((candidate) => candidate.receiverId === this.#receiver);
    if (chunk.state !== ChunkState.READY || !lease) {
      throw new ReadError(`part ${chunk.partIdx} is not READY, or has no lease for this receiver`);
    }
    return lease;
  }

  // A server is its instance_id, whatever address it tells others.
  #channelOf(encoder: EncoderRef | undefined): grpc.Client {
    const own = !encoder?.grpcTarget || encoder.instanceId === this.#instanceId;
    return this.#channel(own ? this.#target : encoder.grpcTarget);
  }

  #channel(target: string): grpc.Client {
    let channel = this.#channels.get(target);
    if (!channel) {
      channel = new grpc.Client(target, this.#credentials, CHANNEL_OPTIONS);
      this.#channels.set(target, channel);
    }
    return channel;
  }

  #callOptions(): grpc.CallOptions {
    return { deadline: Date.now() + this.#timeoutMs };
  }
}

async function check(chunk: EmbeddingChunk, bytes: Uint8Array): Promise<void> {
  const { algorithm, value } = chunk.checksum ?? { algorithm: ChecksumAlgorithm.UNSPECIFIED, value: 0n };
  if (algorithm !== ChecksumAlgorithm.XXH3_64) {
    throw new ReadError(`part ${chunk.partIdx} has a checksum of a kind that this client does not know`);
  }
  const hash = await createXXHash3();
  if (BigInt(`0x${hash.init().update(bytes).digest("hex")}`) !== value) {
    throw new ReadError(`the bytes of part ${chunk.partIdx} do not have its checksum`);
  }
}
