// One part's embedding in this process.
import { DataType } from "../generated/epd/encoder/v1/embedding_pb.js";
import type { EmbeddingChunk } from "../generated/epd/encoder/v1/embedding_pb.js";
import { ReadError } from "./errors.js";

/** The rows of one tensor, dense and row-major. */
export interface Rows {
  /** The size of each dimension, outermost first; of `embedding`: rows, width. */
  readonly shape: readonly number[];
  readonly data: Float32Array;
}

/** The bytes of a part, read and checked, and what they mean. */
export class Embedding {
  constructor(
    /** The READY chunk that it was read by. */
    readonly chunk: EmbeddingChunk,
    /** `chunk.nbytes` bytes, little-endian, as the encoder holds them. */
    readonly bytes: Uint8Array,
  ) {}

  /**
   * A copy of a tensor as 32-bit floats; float16 is not supported.
   *
   * @param name `embedding`, or another one of `chunk.tensors`.
   */
  rows(name = "embedding"): Rows {
    const tensor = this.chunk.tensors.find((candidate) => candidate.name === name);
    if (!tensor) {
      const names = this.chunk.tensors.map((candidate) => candidate.name).join(", ");
      throw new ReadError(`there is no tensor ${name}; there are ${names}`);
    }
    const view = new DataView(this.bytes.buffer, this.bytes.byteOffset, this.bytes.byteLength);
    const element = reader(tensor.dtype, view);
    const shape = tensor.shape.map(Number);
    const strides = tensor.strides.map(Number);
    const data = new Float32Array(shape.reduce((product, size) => product * size, 1));
    const place = shape.map(() => 0);
    for (let index = 0; index < data.length; index++) {
      let offset = Number(tensor.byteOffset);
      for (let axis = 0; axis < shape.length; axis++) offset += (place[axis] ?? 0) * (strides[axis] ?? 0);
      data[index] = element(offset);
      for (let axis = shape.length - 1; axis >= 0; axis--) {
        place[axis] = (place[axis] ?? 0) + 1;
        if ((place[axis] ?? 0) < (shape[axis] ?? 0)) break;
        place[axis] = 0;
      }
    }
    return { shape, data };
  }
}

function reader(dtype: DataType, view: DataView): (offset: number) => number {
  switch (dtype) {
    case DataType.FLOAT32:
      return (offset) => view.getFloat32(offset, true);
    case DataType.BFLOAT16: {
      // The upper half of a float32.
      const word = new DataView(new ArrayBuffer(4));
      return (offset) => {
        word.setUint16(2, view.getUint16(offset, true), true);
        return word.getFloat32(0, true);
      };
    }
    default:
      throw new ReadError(`this client does not read elements of type ${DataType[dtype] ?? dtype}; use bytes`);
  }
}
