// What a TypeScript caller writes: a request, and a look at each kind of event. Prints the request, serialised.
import { create, toBinary } from "@bufbuild/protobuf";
import { Delivery, EncodeRequestSchema, EncoderService } from "./generated/epd/encoder/v1/encoder_service_pb.js";
import type { Event } from "./generated/epd/encoder/v1/encoder_service_pb.js";
import { Modality } from "./generated/epd/encoder/v1/media_pb.js";

declare const process: { stdout: { write(data: Uint8Array): boolean } };

export function describe({ event }: Event): string {
  switch (event.case) {
    case "accepted":
      return `accepted as ${event.value.requestId}`;
    case "chunk":
      return `part ${event.value.partIdx}: ${event.value.tokenCount} rows, ${event.value.nbytes} bytes`;
    case "partFailed":
      return `part ${event.value.partIdx} failed: ${event.value.status?.message ?? ""}`;
    case "partCancelled":
      return `part ${event.value.partIdx} was cancelled`;
    case "complete":
      return `${event.value.ready} ready`;
    case undefined:
      return "an event of a newer server";
  }
}

export const call: string = `${EncoderService.typeName}/${EncoderService.method.encode.name}`;

const request = create(EncodeRequestSchema, {
  promptId: "prompt-1",
  delivery: Delivery.CALLER,
  items: [
    { partIdx: 0, modality: Modality.IMAGE, source: { case: "data", value: new Uint8Array([0xff, 0xd8, 0xff]) } },
  ],
});
process.stdout.write(toBinary(EncodeRequestSchema, request));
