// Calls of the generated service through @grpc/grpc-js.
import { fromBinary, toBinary } from "@bufbuild/protobuf";
import type {
  DescMessage,
  DescMethodServerStreaming,
  DescMethodUnary,
  MessageShape,
} from "@bufbuild/protobuf";
import * as grpc from "@grpc/grpc-js";
import { errorOf } from "./errors.js";

/** Messages of the largest embeddings come in pieces of 1 MiB; a request may hold whole media. */
export const CHANNEL_OPTIONS: grpc.ChannelOptions = {
  "grpc.max_send_message_length": -1,
  "grpc.max_receive_message_length": 64 << 20,
  // A server that vanished without a word is noticed. Servers allow a ping every 5 s, also without a call.
  "grpc.keepalive_time_ms": 30_000,
  "grpc.keepalive_timeout_ms": 20_000,
  "grpc.keepalive_permit_without_calls": 1,
};

/** What is open to one encoder. */
export interface Connection {
  readonly channel: grpc.Client;
  /** Goes with each call. */
  readonly metadata: grpc.Metadata;
}

/** Makes a call with one answer. Throws `EncoderError`. */
export function unary<I extends DescMessage, O extends DescMessage>(
  connection: Connection,
  method: DescMethodUnary<I, O>,
  request: MessageShape<I>,
  options: grpc.CallOptions,
): Promise<MessageShape<O>> {
  return new Promise((resolve, reject) => {
    connection.channel.makeUnaryRequest<MessageShape<I>, MessageShape<O>>(
      pathOf(method),
      (message) => Buffer.from(toBinary(method.input, message)),
      (bytes) => fromBinary(method.output, bytes),
      request,
      connection.metadata.clone(),
      options,
      (error, answer) => (error || !answer ? reject(errorOf(error)) : resolve(answer)),
    );
  });
}

/**
 * Makes a call with a stream of answers. Ending the iteration early, by `break` or an exception, cancels the call: no
 * longer reading would not. Throws `EncoderError`.
 */
export async function* stream<I extends DescMessage, O extends DescMessage>(
  connection: Connection,
  method: DescMethodServerStreaming<I, O>,
  request: MessageShape<I>,
  options: grpc.CallOptions,
): AsyncGenerator<MessageShape<O>, void, undefined> {
  const call = connection.channel.makeServerStreamRequest<MessageShape<I>, MessageShape<O>>(
    pathOf(method),
    (message) => Buffer.from(toBinary(method.input, message)),
    (bytes) => fromBinary(method.output, bytes),
    request,
    connection.metadata.clone(),
    options,
  );
  // A cancelled call still tells so; an `error` event that nobody listens to would end the program.
  call.on("error", () => undefined);
  try {
    for await (const answer of call) {
      yield answer as MessageShape<O>;
    }
  } catch (error) {
    throw errorOf(error);
  } finally {
    call.cancel();
  }
}

function pathOf(method: { name: string; parent: { typeName: string } }): string {
  return `/${method.parent.typeName}/${method.name}`;
}
